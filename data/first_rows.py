"""What the first rows of an export show that no single row does."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from recsys.data import service_lines
from recsys.data.cleaning import OTHER_ID, CleanConfig, is_no_id, placeholders
from recsys.data.column_notes import items_below_0, items_of
from recsys.data.column_words import EVENT_WORDS, rank
from recsys.data.columns import recognise_items
from recsys.data.item_cells import ItemCells, item_cells
from recsys.data.numbers import read_numbers
from recsys.data.opening import TableFile
from recsys.data.raw import ReaderConfig
from recsys.data.report import sentence
from recsys.data.returns import forms_of_pieces, read_pieces
from recsys.data.sample import SAMPLE_ROWS, SURE_SHARE, Chosen, Roles, Sample, free_columns
from recsys.data.texts import as_strings
from recsys.data.time_formats import TimeRules

# Lines with more pieces than others of their items, and items of these; fewer show nothing.
FEW_LINES, FEW_ITEMS_OF_LINES = 5, 3
FEW_ITEMS = 20  # of fewer, one may well be in nearly every order
# Roles of which one shows that events are lines of orders; so do events without rating and type.
ORDERS = frozenset(["session", "quantity", "order_status", "taken_back", "price"])
Conditions = list[tuple[str, str]]


@dataclass(frozen=True)
class FirstRows:
    """What is taken from the first rows.

    Attributes:
        cells: how the cells of the column of items hold items.
        nobody: ids of users that stand for nobody, where other columns say who they are.
        prefix: before ids of sessions that stand for users; empty if these are told apart without.
        service: finds the lines that are no products.
        without_id: whether an item has a title and no id.
        without_user: whether an order has rows with a user and rows without one.
        pieces: texts that show what marks in numbers of pieces mean (`forms_of_pieces`).
        totals: whether prices of the first run seem to be those of all pieces of a line.
        conditions: (column, pattern) by which the settings name such lines in the events.
    """

    cells: ItemCells
    nobody: list[str]
    prefix: str
    service: service_lines.ServiceLines
    pieces: list[str]
    totals: bool
    conditions: Conditions
    without_id: bool
    without_user: bool


def look_at(
    sample: Sample,
    events: Sequence[TableFile],
    roles: Roles,
    items: TableFile | None,
    described: Sample | None,
    chosen: Chosen,
    times: TimeRules,
    config: ReaderConfig,
) -> FirstRows:
    """Look at the first rows of the events, and of the items file if there is one (`described`).

    Raises:
        DataError: an item in very many orders may be no product.
    """
    own, path, clean = roles["item"].column, sample.path, config.clean
    known_form = config.mapping or {}
    cells = as_strings(sample.table[own], "item", path)
    mine: Roles = {}
    known = pa.chunked_array([], pa.string())
    if described is not None:
        before = known_form.get("items") or None
        mine = recognise_items(described, chosen, own, cells.drop_null(), times, before)
        known = described.texts(mine["id"].column)
    form = ItemCells(known_form.get("separator"), known_form.get("numbers_of_pieces"))
    if "separator" not in known_form:
        form = item_cells(path, clean.item_separator, own, cells.drop_null(), known)
    nobody, prefix = [*known_form.get("nobody", [])], known_form.get("prefix", "")
    user, session, without_user = roles["user"].column, roles.get("session"), False
    users = as_strings(sample.table[user], "user", path)
    if session is not None and session.column != user:
        sessions = as_strings(sample.table[session.column], "session", path)
        if clean.applies("placeholder_users"):
            is_order = rank(session.column, EVENT_WORDS["session"][:1]) is None
            nobody += placeholders(users, sessions if is_order else None)
        known_sessions = sessions.filter(pc.invert(is_no_id(sessions)))
        if config.mapping is None and pc.any(pc.is_in(known_sessions, value_set=users)).as_py():
            prefix = f"{session.column} "
        anonymous = pc.or_(
            is_no_id(users), pc.is_in(users, value_set=pa.array(nobody, pa.string()))
        )
        named = pc.unique(sessions.filter(pc.invert(anonymous)))
        mixed = pc.and_not(pc.is_in(sessions, value_set=named), is_no_id(sessions))
        without_user = pc.any(pc.and_(mixed, anonymous)).as_py() or False
    if clean.applies("placeholder_users") and OTHER_ID in roles:
        other = as_strings(sample.table[roles[OTHER_ID].column], "user", path)
        nobody += placeholders(users) + placeholders(other)
    plain, conditions, by_items = _patterns(clean, sample, items)
    doubts: list[str] = []
    for name in free_columns(sample, roles) if service_lines.KEEP not in clean.drop_items else ():
        kinds = service_lines.kinds_of_no_products(name, sample.texts(name))
        conditions += [(name, service_lines.wildcard(kind)) for kind in kinds]
        others = [kind for kind in pc.unique(sample.texts(name)).to_pylist() if kind not in kinds]
        if kinds and len(others) > 1:
            setting = shlex.quote(f"data.clean.drop_items={json.dumps([f'{name}={others[-1]}'])}")
            shown = ", ".join(map(repr, others))
            doubts.append(sentence("kinds_of_items", name=name, shown=shown, setting=setting))
    rows = form.split(sample.table, own)[0]
    orders = [session] if session else [roles[r] for r in ("user", "timestamp") if r in roles]
    bought = items_of(rows, roles, path)
    texts = {
        role: as_strings(rows[roles[role].column], role, path)
        for role in ("price", "quantity", "category", "brand")
        if role in roles
    }
    prices = read_numbers(texts["price"], named=True, prices=True) if "price" in texts else None
    pieces = read_pieces(texts["quantity"]) if "quantity" in texts else None
    totals = False
    if prices is not None and pieces is not None and config.mapping is None:
        totals = _are_totals(bought, prices.values, pieces)
    shares = service_lines.order_shares(
        [as_strings(rows[order.column], "order", path) for order in orders],
        bought,
        prices and prices.values,
        pieces,
        [texts[role] for role in ("category", "brand") if role in texts],
    )
    all_known = described is not None and described.table.num_rows < SAMPLE_ROWS
    ids = frozenset(known.to_pylist()) if all_known else frozenset()
    is_order = not ORDERS.isdisjoint(roles) or {"rating", "behaviour"}.isdisjoint(roles)
    plain += known_form.get("no_products", [])
    told = described is not None or bool(known_form.get("items") or conditions)
    told = told or pc.count_distinct(bought).as_py() < FEW_ITEMS
    below = frozenset(items_below_0(sample, roles))
    service = service_lines.ServiceLines(
        plain, set(), below, ids, *shares, is_order, told, doubts=doubts
    )
    if items is not None:
        service.named = _named(items, mine, by_items, service)
    titles = _titles(sample, own, roles) | (_titles(described, "", mine) if described else {})
    service.ask(titles, stops=not config.new_items)  # nobody answers at night
    without_id = "title" in roles and pc.any(is_no_id(cells)).as_py()
    shown = known_form.get("pieces", []) + _pieces(events, roles)
    without = (without_id, without_user)
    return FirstRows(form, nobody, prefix, service, shown, totals, conditions, *without)


def _are_totals(items: pa.ChunkedArray, prices: pa.ChunkedArray, pieces: pa.ChunkedArray) -> bool:
    """Whether nearly all lines of more pieces than others of the item cost as many times more."""
    numbers = {"price": prices.to_numpy(), "pieces": pieces.to_numpy()}
    rows = pd.DataFrame({"item": items.to_pandas(), **numbers})
    rows = rows[(rows["price"] > 0) & (rows["pieces"] > 0)]
    rows["times"] = rows["pieces"] / rows.groupby("item")["pieces"].transform("min")
    fewest = rows[rows["times"] == 1].groupby("item")["price"].median()
    more = rows[rows["times"] > 1]
    nearer = 2 * more["price"] > more["item"].map(fewest).astype(float) * (1 + more["times"])
    enough = len(more) >= FEW_LINES and more["item"].nunique() >= FEW_ITEMS_OF_LINES
    return enough and bool(nearer.mean() >= SURE_SHARE)


def _pieces(files: Sequence[TableFile], roles: Roles) -> list[str]:
    """What marks in numbers of pieces mean, by all files, if the first rows of one have such."""
    if "quantity" not in roles:
        return []
    name = roles["quantity"].column

    def texts(file: TableFile) -> Iterator[pa.ChunkedArray]:
        return (as_strings(batch[name], "quantity", file.path) for batch in file.batches([name]))

    first = [column for file in files for column in islice(texts(file), 1)]
    marked = any(pc.any(pc.match_substring_regex(column, "[.,]")).as_py() for column in first)
    return forms_of_pieces(column for file in files for column in texts(file)) if marked else []


def _patterns(
    clean: CleanConfig, sample: Sample, items: TableFile | None
) -> tuple[list[str], Conditions, Conditions]:
    """The patterns of ids, and the conditions on columns of the events and of the items."""
    plain: list[str] = []
    conditions: Conditions = []
    by_items: Conditions = []
    for text in clean.drop_items:
        column, _, value = text.partition("=")
        if value and column in sample.table.column_names:
            conditions.append((column, service_lines.wildcard(value)))
        elif value and items is not None and column in items.names:
            by_items.append((column, service_lines.wildcard(value)))
        else:
            plain.append(text)
    return plain, conditions, by_items


def _named(
    items: TableFile, mine: Roles, conditions: Conditions, service: service_lines.ServiceLines
) -> set[str]:
    """The ids that the items file shows to be no products, by title or by a condition."""
    roles = [mine[role].column for role in ("id", "title") if role in mine]
    found: set[str] = set()
    for batch in items.batches({*roles, *(column for column, _ in conditions)}):
        ids, *titles = (pc.fill_null(as_strings(batch[c], "id", items.path), "") for c in roles)
        for column, pattern in conditions:
            texts = pc.fill_null(as_strings(batch[column], column, items.path), "")
            found.update(ids.filter(pc.match_substring_regex(texts, pattern)).to_pylist())
        texts = titles[0] if titles else ids
        pairs = zip(ids.to_pylist(), texts.to_pylist(), strict=True)
        found.update(item for item, title in pairs if service.is_service(item, title))
    return found


def _titles(sample: Sample, own: str, roles: Roles) -> dict[str, str]:
    """Item -> title in the first rows of a file."""
    if "title" not in roles:
        return {}
    names = [roles["id"].column if "id" in roles else own, roles["title"].column]
    ids, titles = (as_strings(sample.table[n], "title", sample.path).to_pylist() for n in names)
    return {item: title or "" for item, title in zip(ids, titles, strict=True) if item}
