"""The words of the synthetic shop in `shop.json`: departments, genres, makers and places."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files as resources

from recsys.config import build


@dataclass(frozen=True)
class Genre:
    """One kind of thing on sale.

    Attributes:
        name: category.
        phrase: what one item is.
        companion: the genre that people come to from this one.
        firsts: first words of a title.
        seconds: second words of a title.
        makers: two for each price tier: budget, middle, premium.
    """

    name: str
    phrase: str
    companion: str
    firsts: tuple[str, ...]
    seconds: tuple[str, ...]
    makers: tuple[str, ...]


@dataclass(frozen=True)
class Department:
    """A part of the shop.

    Attributes:
        name: category above the genres.
        thing: prefix of item ids.
        title: how a name becomes a title.
        volume: how a title becomes that of a volume.
        prices: typical price in each tier.
        genres: what is sold there.
    """

    name: str
    thing: str
    title: str
    volume: str
    prices: tuple[float, float, float]
    genres: tuple[Genre, ...]


@dataclass(frozen=True)
class Words:
    """The contents of `shop.json`.

    Attributes:
        departments: of the shop.
        places: appended to names when the words of a genre have been used up.
    """

    departments: tuple[Department, ...]
    places: tuple[str, ...]


_TEXT = resources("recsys.data").joinpath("shop.json").read_text("utf-8")
WORDS = build(Words, json.loads(_TEXT), where="shop.json")
