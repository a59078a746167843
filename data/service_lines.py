"""Recognises lines of orders that are no products: shipping, fees, discounts, corrections.

A line is recognised by its id or title, if all its words are of such lines. Words that products may
have too count only where the line stands out: its id has no digit where others have, it is in many
orders, or the items file does not know it. A line in very many orders with only some such words is
asked about.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.availability import each
from recsys.data.column_words import pattern, words
from recsys.data.report import sentence
from recsys.data.sample import SURE_SHARE
from recsys.errors import DataError
from recsys.event_names import normalised

KEEP = "none"  # the pattern that turns the recognition off
MANY, VERY_MANY, NEARLY_ALL = 0.1, 0.2, 0.8  # shares of the orders
ENOUGH_ORDERS = 50  # below this, shares say nothing
WITH_DIGITS = 0.8  # share of lines whose id has a digit, from which an id without one stands out
SURE, WEAK, VOUCHERS = map(pattern, ("no_products", "weak_no_products", "vouchers"))
CONTEXT = words("beside_no_products")
KINDS_OF_LINES = re.compile("(line|row|position|zeile|itemiz).*(type|typ|art|kind)")
KINDS_OF_ITEMS = re.compile("type|typ|art|kind|tipo")  # where one of the kinds is that of items
MOST_KINDS = 20
SURELY = 10  # cases that are expected of an item that has none
MOST_PRICES = 3  # of an item whose price does not depend on the order
SORTED = 0.9  # share of the lines whose id follows the one before in their order
DIVIDED = "\x1f"  # between the id and the title of a line
Says = Literal["sure", "weak", "part", "some"]


def wildcard(text: str) -> str:
    """A pattern in which `*` stands for any characters, as a regular expression for whole texts."""
    return "(?s)^" + ".*".join(map(re.escape, text.split("*"))) + "$"


@lru_cache(1 << 16)
def says(text: str) -> Says | None:
    """How far the words of an id or a title are those of a line that is no product.

    >>> [says(text) for text in ("DOTCOM POSTAGE", "Manual", "Delivery truck", "Booking fee")]
    ['sure', 'weak', 'part', 'some']
    >>> says("Toffee"), says("85123A")
    (None, None)
    """
    text = VOUCHERS.sub(" voucher ", text)
    parts = [normalised(word) for word in re.findall(r"[^\W\d_]+", text)]
    sure = [bool(SURE.fullmatch(word)) for word in parts]
    weak = [bool(WEAK.fullmatch(word)) for word in parts]
    known = zip(parts, sure, weak, strict=True)
    if not all(is_sure or is_weak or word in CONTEXT for word, is_sure, is_weak in known):
        return "part" if any(sure) else "some" if any(weak) else None
    return "sure" if any(sure) else "weak" if any(weak) else None


@dataclass
class ServiceLines:
    """Finds such lines among events.

    Attributes:
        patterns: ids, or patterns of ids with `*`, from the settings; `none` among them turns the
            recognition off, and `!` before one says that it is a product.
        named: ids that the items file shows to be no products.
        below_0: items that nothing but lines with a price below 0 have.
        described: the ids of the items file, as far as they are known; empty without one.
        shares: item -> share of the orders, for items in many of them.
        with_digits: share of the lines whose id has a digit.
        apart: items that the orders show to be unlike products (`_items_apart`).
        orders: whether the events are lines of orders; among ratings and clicks, an item that only
            has the name of such a line is one of the shop, unless it stands out.
        told: whether a file or a column says which lines are products, or the shop has so few items
            that one of them may be in nearly every order.
        dropped: item -> rows that were found.
        kept: item -> rows of items that are named like such lines, and do not stand out.
        doubts: sentences on items of which nobody could say what they are.
    """

    patterns: Sequence[str] = ()
    named: Collection[str] = ()
    below_0: Set[str] = frozenset()
    described: Set[str] = frozenset()
    shares: Mapping[str, float] = field(default_factory=dict)
    with_digits: float = 0.0
    apart: Collection[str] = ()
    orders: bool = True
    told: bool = True
    dropped: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    doubts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        products = [text for text in self.patterns if text.startswith("!")]
        others = [text for text in self.patterns if text != KEEP and text not in products]
        self._products = [re.compile(wildcard(text[1:])) for text in products]
        self._by_id = [re.compile(wildcard(text)) for text in others]
        self._recognises = KEEP not in self.patterns
        self._known: dict[str, tuple[bool, bool]] = {}

    def find(self, events: pa.Table) -> pa.ChunkedArray:
        """(rows,) bool: whether rows are no products, by `item`, `title` and `named` if known."""
        items, titles = pc.fill_null(events["item"], ""), pa.scalar("")
        if "title" in events.column_names:
            titles = pc.fill_null(events["title"], "")
        lines = pc.binary_join_element_wise(items, titles, DIVIDED)
        bad = each(lines, lambda line: self._judge(line)[0])
        if "named" in events.column_names:
            bad = pc.or_(bad, pc.and_not(events["named"], each(items, self._is_product)))
        left = pc.and_not(each(lines, lambda line: self._judge(line)[1]), bad)
        for counter, rows in ((self.dropped, bad), (self.kept, left)):
            for row in pc.value_counts(events["item"].filter(rows)).to_pylist():
                counter[row["values"]] += row["counts"]
        return bad

    def is_service(self, item: str, title: str = "") -> bool:
        """Whether an item is no product, by its id or its title."""
        return self._judge(f"{item}{DIVIDED}{title}")[0]

    def _judge(self, line: str) -> tuple[bool, bool]:
        """Whether a line is no product, and whether it is named like one; each is read once."""
        if line not in self._known:
            self._known[line] = self._decide(*line.split(DIVIDED)), self._is_named(line)
        return self._known[line]

    def _decide(self, item: str, title: str) -> bool:
        if self._is_product(item):
            return False
        if item in self.named or any(pattern.match(item) for pattern in self._by_id):
            return True
        if not self._recognises:
            return False
        said = {says(item), says(title)}
        if ("sure" in said and self.orders) or (item in self.below_0 - self.described):
            return True
        return not said.isdisjoint(("sure", "weak")) and self._stands_out(item)

    def _is_named(self, line: str) -> bool:
        said = {says(text) for text in line.split(DIVIDED)}
        return self._recognises and not said.isdisjoint(("sure", "weak"))

    def _is_product(self, item: str) -> bool:
        return any(pattern.match(item) for pattern in self._products)

    def _stands_out(self, item: str) -> bool:
        numbered = self.orders and self.with_digits >= WITH_DIGITS
        odd = numbered and not any(sign.isdigit() for sign in item)
        unknown = bool(self.described) and item not in self.described
        return odd or unknown or item in self.below_0 or self.shares.get(item, 0.0) >= MANY

    def ask(self, titles: Mapping[str, str], *, stops: bool) -> None:
        """Stop, or say in the summary, if an item in very many orders may be no product.

        It `stops` where somebody can answer; the `titles` are those of items, as far as known.

        Raises:
            DataError: it may be; the message names the options that decide.
        """
        present = [item for item in self.shares if item in self.described]
        for item, share in self.shares.items() if self._recognises else ():
            title = titles.get(item, "")
            missing = bool(present) and item not in self.described
            everywhere = self.orders and not self.told and share >= NEARLY_ALL
            doubtful = missing or everywhere or {says(item), says(title)} != {None}
            if share < VERY_MANY or not doubtful or self._is_product(item):
                continue
            if self.is_service(item, title):
                continue
            name = f"{item!r} ({title})" if title and title != item else repr(item)
            why = "has the name of a fee or of shipping"
            if missing or everywhere:
                why = "is not in the items file" if missing else "no items file describes it"
            said = {"leave": self._setting(item), "keep": self._setting(f"!{item}")}
            doubt = sentence("doubtful_line", name=name, share=share, why=why, **said)
            self._doubt(doubt, stops)
        apart = [item for item in self.apart if not (self.told or self._is_product(item))]
        apart = [item for item in apart if not self.is_service(item, titles.get(item, ""))]
        if apart and self.orders and self._recognises:
            shown = (
                f"{i!r} ({titles.get(i) or i}, {self.shares[i]:.0%} of the orders)" for i in apart
            )
            leave, keep = self._setting(*apart), self._setting(*(f"!{i}" for i in apart))
            doubt = sentence("lines_apart", shown=", ".join(shown), leave=leave, keep=keep)
            self._doubt(doubt, stops)

    def _doubt(self, doubt: str, stops: bool) -> None:
        if stops:
            raise DataError(doubt)
        self.doubts.append(f"{doubt}.")

    def summary(self) -> str:
        """What was left out, and what was kept although it has such a name; empty for nothing."""
        sentences = [*self.doubts]
        if self.dropped:
            said = {"every": self._setting(KEEP), "shown": self._shown(self.dropped)}
            setting = self._setting(f"!{next(iter(self.dropped))}")
            sentences.append(sentence("left_out", one=setting, **said))
        if self.kept:
            setting = self._setting(next(iter(self.kept)))
            sentences.append(sentence("kept_lines", shown=self._shown(self.kept), one=setting))
        return " ".join(sentences)

    def _setting(self, *more: str) -> str:
        patterns = json.dumps([*self.patterns, *more], ensure_ascii=False)
        return f"--set {shlex.quote(f'data.clean.drop_items={patterns}')}"

    def _shown(self, lines: Counter[str]) -> str:
        shown = ", ".join(
            f"{item!r} ({rows:,} rows"
            + (f", in {self.shares[item]:.0%} of the orders)" if item in self.shares else ")")
            for item, rows in lines.most_common(5)
        )
        return shown + (f" and {len(lines) - 5} more" if len(lines) > 5 else "")


def kinds_of_no_products(name: str, values: pa.ChunkedArray) -> list[str]:
    """The values of a column of kinds of lines that are of lines that are no products.

    >>> kinds = pa.chunked_array([["Artikel", "Versandposition", "fee"]])
    >>> kinds_of_no_products("Positionstyp", kinds), kinds_of_no_products("Product type", kinds)
    (['Versandposition', 'fee'], [])
    """
    kinds, key = pc.unique(values).to_pylist(), normalised(name)
    of_items = KINDS_OF_ITEMS.fullmatch(key) and any(
        normalised(kind) in words("items") for kind in kinds[:MOST_KINDS]
    )
    if not of_items and not KINDS_OF_LINES.search(key):
        return []
    named = [kind for kind in kinds if says(kind) in ("sure", "weak")]
    return named if len(named) < len(kinds) <= MOST_KINDS else []


def order_shares(
    orders: Sequence[pa.ChunkedArray],
    items: pa.ChunkedArray,
    prices: pa.ChunkedArray | None = None,
    pieces: pa.ChunkedArray | None = None,
    kinds: Sequence[pa.ChunkedArray] = (),
) -> tuple[dict[str, float], float, list[str]]:
    """What the first rows show: `shares`, `with_digits` and `apart` of `ServiceLines`.

    Args:
        orders: columns that together tell the orders apart.
        items: the item of each row; empty where it is missing.
        prices: (rows,) as numbers; None without such.
        pieces: (rows,) as numbers; None without such.
        kinds: columns such as the category and the brand of the items.
    """
    rows = pd.DataFrame({f"order{n}": order.to_pandas() for n, order in enumerate(orders)})
    keys = list(rows.columns)
    rows = rows.assign(item=items.to_pandas(), price=np.nan, pieces=np.nan)
    for name, numbers in (("price", prices), ("pieces", pieces)):
        if numbers is not None:
            rows[name] = numbers.to_numpy()
    rows = rows[rows["item"].fillna("") != ""]
    rows["order"] = rows.groupby(keys, dropna=False).ngroup()
    lines = rows.drop_duplicates(["order", "item"])
    total, counts = lines["order"].nunique(), lines["item"].value_counts(sort=False)
    digits = float(counts[counts.index.str.contains(r"\d")].sum() / max(len(lines), 1))
    if total < ENOUGH_ORDERS:
        return {}, digits, []
    common = dict[str, float](counts[counts >= MANY * total] / total)
    apart = _items_apart(rows, lines, common)
    for kind in kinds:  # what has the category or the brand of another item is a product
        texts = kind.to_pandas()[rows.index].replace("", None)
        shared = rows.groupby(texts)["item"].transform("nunique") > 1
        apart = [item for item in apart if not shared[rows["item"] == item].any()]
    return common, digits, apart


def _items_apart(rows: pd.DataFrame, lines: pd.DataFrame, common: Mapping[str, float]) -> list[str]:
    """Of the items in many orders, those that no order has alone, twice, or in several pieces.

    By the other lines, several orders should have it alone. It also has no price, or many prices,
    while the others have one each; or it is in very many orders, of each the last line, and lines
    do not stand in the order of ids.
    """
    size = lines.groupby("order")["item"].size()
    paid = rows["price"] > 0
    prices = rows.groupby("item")["price"].nunique()
    ends = rows["order"] != rows["order"].shift(-1)
    rises = rows["item"] > rows["item"].shift(1)
    is_sorted = rises[rows["order"] == rows["order"].shift(1)].mean() > SORTED
    several = rows["item"][rows["pieces"] > 1]
    twice = rows["item"][rows.duplicated(["order", "item"])]
    alone = lines["item"][lines["order"].map(size) == 1]
    once = [item for item in common if item not in {*several, *twice, *alone}]
    single = (lines[~lines["item"].isin(once)].groupby("order").size() == 1).mean()
    apart = []
    for item in once:
        mine = rows["item"] == item
        if single * mine.sum() < SURELY:
            continue
        free = not paid[mine].any() and paid[~mine].mean() > SURE_SHARE
        varies = prices[item] > MOST_PRICES and prices.median() == 1
        last = common[item] >= VERY_MANY and ends[mine].all() and not is_sorted
        if free or varies or last:
            apart.append(item)
    return apart
