"""The words of `words.toml`, and the names of columns that are composed of them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files
from typing import Any, TypeVar

from recsys.event_names import normalised

T = TypeVar("T")
_TABLE = tomllib.loads(files("recsys.data").joinpath("words.toml").read_text("utf-8"))
WORDS: dict[str, str] = _TABLE["words"]
TIMES: dict[str, list[tuple[str, str]]] = _TABLE["times"]
CURRENCY_AT_END = r"(?i)[\W_]+(eur|euro|usd|gbp|chf|pln|sek|dkk|nok|czk)\W*$"  # Preis (EUR)
OF = ("", "of", "d", "de", "du", "del", "dela", "della", "dell", "da", "do", "di", "van", "vande",
      "des", "der", "for", "fur", "pour")  # fmt: skip
SURE_PARTS = 6  # characters of a name that may stand inside a longer one, like `fk_customer_id`
ENDINGS = ("id", "nr", "number", "nummer", "code", "stamp", "time", "type")


@dataclass(frozen=True)
class Names:
    """One group of names.

    Attributes:
        words: whole names, the surest first.
        pairs: words of which one of the first stands beside one of the second, in either order.
    """

    words: str
    pairs: tuple[tuple[str, str], ...] = ()

    @cached_property
    def _words(self) -> list[str]:
        return self.words.split()

    @cached_property
    def _pairs(self) -> list[tuple[frozenset[str], frozenset[str]]]:
        return [(frozenset(a.split()), frozenset(b.split())) for a, b in self.pairs]

    def place(self, key: str) -> int | None:
        """The place of a normalised name in the group; None if it is not in it.

        >>> Names("klant", (("klant", "nummer"),)).place("nummervandeklant")
        1
        """
        if key in self._words:
            return self._words.index(key)
        for cut in range(1, len(key)):
            left, right = key[:cut], key[cut:]
            for nouns, words in self._pairs:
                is_pair = left in nouns and right in words
                if is_pair or (left in words and any(right == of + n for of in OF for n in nouns
                                                     if right.endswith(n))):  # fmt: skip
                    return len(self._words)
        return None


Groups = tuple[Names, ...]


def words(name: str) -> frozenset[str]:
    """The words of one name in `words.toml`.

    >>> "refunded" in words("returned")
    True
    """
    return frozenset(_text(WORDS[name]).split())


def is_of_later(name: str) -> bool:
    """Whether a time, by its name, is not that of an event, such as `Shipped at` and `Arrival`.

    >>> is_of_later("Versanddatum"), is_of_later("Order date")
    (True, False)
    """
    return any(part in normalised(name) for part in words("later"))


def pattern(name: str) -> re.Pattern[str]:
    """The words of one name in `words.toml` that are a regular expression."""
    return re.compile("".join(WORDS[name].split()), re.IGNORECASE)


def _text(text: str) -> str:
    return re.sub(r"\$(\w+)", lambda match: _text(WORDS[match[1]]), text)


def _groups(roles: dict[str, list[dict[str, Any]]]) -> dict[str, Groups]:
    return {
        role: tuple(
            Names(
                _text(group["names"]),
                tuple((_text(first), _text(second)) for first, second in group.get("pairs", ())),
            )
            for group in groups
        )
        for role, groups in roles.items()
    }


EVENT_WORDS = _groups(_TABLE["events"])
EVENT_FIELDS = _groups(_TABLE["fields"])  # fields of items in the events
ITEM_WORDS = _groups(_TABLE["items"])
ITEM_WORDS["id"] = EVENT_WORDS["item"] + ITEM_WORDS["id"]


@lru_cache(1 << 16)  # asked again for every role and every file
def rank(name: str, groups: Groups) -> int | None:
    """How surely a column of this name has a role: 0 is the surest; None if it does not fit."""
    best = _best(name, groups)
    return None if best is None else best[0]


def order(name: str, groups: Groups) -> tuple[int, int]:
    """Sorts columns with a role by how usual their names are."""
    return _best(name, groups) or (2 * len(groups), 0)


def known_names(names: Iterable[str]) -> int:
    """How many names are those of a role.

    >>> known_names(["Kunde", "Datum", "Blau"])
    2
    """
    return sum(map(_is_known, names))


def has_role(role: str, names: Iterable[str]) -> bool:
    """Whether one of the names is that of a column with a role."""
    return any(rank(name, EVENT_WORDS[role]) is not None for name in names)


def all_of(role: str, roles: Mapping[str, T]) -> list[T]:
    """What is known of each column that has a role of `SEVERAL`.

    >>> all_of("unavailable", {"id": "sku", "unavailable": "sold_out", "unavailable 2": "hidden"})
    ['sold_out', 'hidden']
    """
    return [match for name, match in roles.items() if name.partition(" ")[0] == role]


def is_of_a_user(name: str) -> bool:
    """Whether a field belongs to the record of a user, such as `customer.newsletter.status`."""
    return any(rank(part, EVENT_WORDS["user"]) is not None for part in name.split(".")[:-1])


@lru_cache(1 << 16)  # asked again for every mark that may divide columns
def _is_known(name: str) -> bool:
    groups = (*EVENT_WORDS.values(), *EVENT_FIELDS.values(), *ITEM_WORDS.values())
    return any(_best(name, group) is not None for group in groups)


def _best(name: str, groups: Groups) -> tuple[int, int] | None:
    ranks = [_place(key, groups) for key in _keys(name)]
    return min((number for number in ranks if number is not None), default=None)


def _keys(name: str) -> list[str]:
    """The forms in which a name is looked up: a field of a record also by its own name.

    >>> _keys("order.customer.id"), _keys("lines.sku"), _keys("Kunden-Nr.")
    (['ordercustomerid', 'id', 'customerid', 'customer'], ['linessku', 'sku'], ['kundennr'])
    >>> _keys("Credit Memo #"), _keys("Order Lines/Product")
    (['creditmemono'], ['orderlinesproduct', 'product'])
    """
    name = name.replace("#", " no ")
    parts = [key for key in map(normalised, re.split(r"\.|(?<=\w)/(?=\w)", name)) if key]
    keys = [normalised(name)]
    if len(parts) > 1:
        keys.append(parts[-1])
        if parts[-1] in words("ids"):
            keys += ["".join(parts[-2:]), parts[-2]]
    return keys


def _place(key: str, groups: Groups) -> tuple[int, int] | None:
    """The group of a name and its place there; later groups for a name inside a longer one."""
    for number, group in enumerate(groups):
        if (position := group.place(key)) is not None:
            return number, position
    parts = [part for cut in range(SURE_PARTS, len(key)) for part in (key[:cut], key[-cut:])]
    parts = [part for part in parts if part.endswith(ENDINGS)]
    for number, group in enumerate(groups):
        if any(group.place(part) is not None for part in parts):
            return len(groups) + number, 0
    return None
