"""The words of the synthetic shop in `shop.json`: departments, genres, makers and places."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files as resources

from pydantic import TypeAdapter


@dataclass(frozen=True)
class Genre:
    """One genre of items.

    Attributes:
        name: of the category.
        phrase: describes one item.
        companion: the genre that customers often turn to after this one.
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
    """A department of the shop.

    Attributes:
        name: of the category above the genres.
        thing: prefix of item ids.
        title: format that makes a title from a name.
        volume: format that makes the title of a volume.
        prices: typical price in each tier.
        genres: of the department.
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
WORDS = TypeAdapter(Words).validate_json(_TEXT)
