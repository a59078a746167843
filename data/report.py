"""The report on a shop's export: the columns, what was found, what was done, and how to change it.

It goes to the terminal, to `report.html` beside the data set, and as JSON into the manifest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from recsys.errors import DataError

EXAMPLES = 3
TEMPLATE = "report.html.jinja"


class Rule(NamedTuple):
    """The words of one rule.

    Attributes:
        found: sentence about what was found.
        done: what was done about it.
        otherwise: the setting that chooses otherwise; empty if there is none.
        asks: whether the run stops where the rule would remove more than `most_removed`. Copies and
            repeated steps are merged, so that no user and no item is lost by it.
        by_users: whether only the share of the users counts, because the events of one user may be
            most of all.
        most: the share up to which the rule never asks, whatever `most_removed` is.
        roles: of the columns that say which events the rule removes.
    """

    found: str
    done: str
    otherwise: str = ""
    asks: bool = True
    by_users: bool = False
    most: float = 0.0
    roles: tuple[str, ...] = ()


RULES: dict[str, Rule] = {
    "damaged_rows_skipped": Rule(
        "rows do not have the header's number of columns, or a quote in them is not closed",
        "skipped",
        "data.clean.damaged_rows=0 refuses such a file",
        asks=False,  # it has a share of its own
    ),
    "rows_with_several_items_split": Rule(
        "rows hold several items in one cell",
        "split into a row for each item",
        "data.clean.item_separator=none keeps the cell as one item",
    ),
    "rows_named_by_title": Rule(
        "rows have no item id, but the name of an item", "the name is taken as the id"
    ),
    "files_not_in_utf8": Rule(
        "files are not in UTF-8", "read as UTF-16 (with a mark) or as Windows-1252"
    ),
    "rows_without_user_or_item_dropped": Rule(
        "rows have no user or no item",
        "dropped",
        "data.clean.skip=missing_ids refuses the file",
    ),
    "rows_of_no_products_dropped": Rule(
        "rows are lines that are no products, such as shipping or fees",
        "dropped, and never recommended",
        "'data.clean.drop_items=[none]' keeps them",
    ),
    "tracking_parameters_removed": Rule(
        "items are URLs with parameters of a campaign",
        "the parameters are removed, so that one page is one item",
        "without data.clean.also=tracking they are kept",
    ),
    "rows_of_cancelled_orders_dropped": Rule(
        "rows are of orders that were cancelled or not paid, or of 0 pieces",
        "dropped; the same users' other events on the items stay",
        "data.clean.skip=cancelled_orders keeps them as purchases",
        roles=("taken_back", "order_status", "quantity"),
    ),
    "ids_with_a_decimal_place": Rule(
        "ids are whole numbers with a decimal place, as some programs write them",
        "the decimal place is removed, so that 100.0 is 100",
    ),
    "texts_in_another_spelling": Rule(
        "ids have letters in another spelling of Unicode than NFC",
        "brought to NFC, so that both spellings are one id",
    ),
    "sessions_without_user": Rule(
        "rows have no user, but a session",
        "the session is taken as the user",
        "data.columns.session=none drops them",
    ),
    "rows_with_unreadable_times_dropped": Rule(
        "rows have no time, or one that cannot be read",
        "dropped",
        "data.clean.skip=unreadable_times refuses the file",
    ),
    "times_with_a_zone": Rule("times name their time zone", "converted to UTC"),
    "times_without_a_zone": Rule(
        "times name no time zone",
        "read as times of data.time_zone, which is UTC by default",
        "data.time_zone=Europe/Berlin, for example, reads them as the time of a place",
    ),
    "rows_with_impossible_times_dropped": Rule(
        "rows have a time before 1990 or in the future",
        "dropped",
        "data.clean.skip=impossible_times keeps them",
    ),
    "quantities_unreadable": Rule(
        "numbers of pieces cannot be read as such", "the events count, without a number of pieces"
    ),
    "ratings_unreadable": Rule("ratings are not numbers", "read as missing"),
    "events_of_placeholder_users_dropped": Rule(
        "events belong to a user such as 'guest', who is not one person",
        "dropped",
        "data.clean.skip=placeholder_users keeps them",
    ),
    "events_of_test_users": Rule(
        "events belong to users whose ids look like those of tests or of staff",
        "kept",
        "data.clean.also=test_users drops them",
    ),
    "events_of_test_users_dropped": Rule(
        "events belong to users whose ids look like those of tests or of staff",
        "dropped",
        "without data.clean.also=test_users they are kept",
    ),
    "events_of_bots_dropped": Rule(
        "events belong to users with far more events than all others",
        "dropped as bots",
        "data.clean.bots=0 keeps them, another number sets the smallest count of a bot",
        by_users=True,
    ),
    "duplicate_rows_dropped": Rule(
        "rows repeat the user, item, time, type and rating of another row",
        "dropped",
        "data.duplicates=keep keeps them",
        asks=False,
    ),
    "pieces_of_equal_rows_added": Rule(
        "of the rows that repeat another one have pieces, as equal lines of orders",
        "added to the pieces of the row that stays, so that returns are counted against all",
        asks=False,
    ),
    "events_at_the_same_time": Rule(
        "events have the user and time of the event before, to the finest unit that is given",
        "kept in the order of the file; in the opposite order if the file is newest first",
    ),
    "near_duplicate_events_merged": Rule(
        "events follow another event of the same user on the same item within minutes",
        "merged into one step with the strongest type and the last time",
        "data.clean.skip=near_duplicates keeps them",
        asks=False,
    ),
    "low_ratings_dropped": Rule(
        "events have low ratings",
        "not used as positives",
        "data.clean.skip=negative_feedback keeps them; data.clean.negative_rating says which "
        "ratings are low",
        most=0.5,  # the lower two fifths of a scale are ordinary among reviews
        roles=("rating",),
    ),
    "negative_events_dropped": Rule(
        "events are dislikes, returns or removals",
        "not used as positives",
        "data.clean.skip=negative_feedback keeps them; data.behaviours says what is negative",
        roles=("behaviour", "taken_back", "order_status", "quantity"),
    ),
    "events_before_negative_dropped": Rule(
        "earlier events of the same users are on items that they then disliked or returned",
        "not used as positives",
        "data.clean.skip=negative_feedback keeps them",
        roles=("rating", "behaviour", "taken_back", "order_status", "quantity"),
    ),
    "rows_below_min_rating_dropped": Rule(
        "events are rated below data.min_rating", "dropped", asks=False
    ),
    "rows_outside_core_dropped": Rule(
        "events are of users or items with fewer events than data.k_core", "dropped", asks=False
    ),
    "rows_of_short_users_dropped": Rule(
        "events are of users with fewer events than data.min_length", "dropped", asks=False
    ),
    "partial_returns_dropped": Rule(
        "rows are returns of a part of what the user bought of the item",
        "not used; the purchase stays until all pieces are returned",
        "data.columns.quantity=none ignores the pieces, so that returns are not recognised by them",
    ),
    "unknown_items": Rule(
        "items of the events are not in the items file",
        "kept in histories, and never recommended",
        "data.clean.skip=unknown_items recommends them",
    ),
    "damaged_item_rows_skipped": Rule(
        "rows of the items file do not have the header's number of columns", "skipped"
    ),
    "item_rows_without_id_dropped": Rule("rows of the items file have no id", "dropped"),
    "repeated_item_rows_dropped": Rule(
        "rows of the items file repeat an id",
        "dropped; the first row of an id counts, but an item is available if one of its rows is",
    ),
    "item_fields_filled": Rule(
        "fields of the items file are empty, and the events have them",
        "filled: titles, categories and brands with the most frequent value, prices with the "
        "latest",
    ),
    "items_without_title": Rule(
        "items have no title", "their id is the title", "data.columns.title=NAME"
    ),
    "item_texts_cleaned": Rule(
        "titles and texts contain markup, entities or superfluous blanks",
        "removed",
        "data.clean.skip=item_texts keeps them",
    ),
    "prices_read": Rule(
        "prices have a currency, a decimal comma or a mark for thousands",
        "read as numbers",
        "data.clean.skip=prices keeps the texts",
    ),
    "prices_of_thousands": Rule(
        "prices have three digits after the only mark, as 1.299, and no other price of the shop "
        "shows what the mark means",
        "read as thousands, because prices have two decimals",
        "data.clean.skip=prices reads a dot as the decimal point",
    ),
    "values_not_read": Rule(
        "values in columns of numbers or dates cannot be read as such",
        "read as missing, one by one",
    ),
    "values_that_say_nothing": Rule("values such as N/A stand for no value", "read as missing"),
    "category_paths_split": Rule(
        "values are paths of categories",
        "split into lists; the first part is an attribute of its own",
        "data.clean.skip=category_paths keeps the texts",
    ),
    "columns_without_information_dropped": Rule(
        "columns of the items file are empty, have one value in all rows, or number the rows",
        "dropped",
        "data.clean.skip=constant_columns keeps them",
    ),
    "unavailable_items": Rule(
        "items are not available",
        "kept in histories, and never recommended while they are unavailable",
        "data.columns.available=none ignores the column",
    ),
    "last_days": Rule(
        "items have a last date without a time of day",
        "available until that day ends, in data.time_zone",
        "data.time_zone=Europe/Berlin, for example, ends the days of a place",
    ),
    "items_outside_dates": Rule(
        "items are before the first or after the last date of their availability",
        "kept in histories, and recommended only between the dates",
        "data.columns.available_from=none and data.columns.available_until=none ignore them",
    ),
}


# The rules for single rows, before there are histories.
BY_ROW = frozenset(name for name in RULES if name.startswith("rows_"))

FILTERS = (
    "rows_below_min_rating_dropped",
    "rows_outside_core_dropped",
    "rows_of_short_users_dropped",
)


@dataclass
class Removed:
    """What one rule removed.

    Attributes:
        events: rows of events.
        items: the items that these rows are on; None if the rule cannot know them.
        users: users who lost all their events by it.
        owners: users of the rows, of whom it is not yet known whether they have other rows.
    """

    events: int = 0
    items: set[Any] | None = field(default_factory=set)
    users: int = 0
    owners: set[str] = field(default_factory=set)


@dataclass
class Report:
    """What was found in an export and what was done.

    Attributes:
        columns: file, role, column, reason and sample values of each recognised column.
        counts: rule -> number of cases, by the names in `RULES`.
        examples: rule -> up to three cases.
        notes: further sentences.
        behaviours: name, role, weight and number of events of each type.
        rows: rows of events, after cells with several items were split.
        split: how many of these were made by splitting.
        old: how many of these are of the data before, in a run with a parent.
        no_products: the lines that are no products, as rows of each item.
        removed: rule -> what it removed of them.
        left: events and items that are used in the end.
        mapping: what was decided about the form of the files, for later files of the same form:
            `events` and `items` (role -> column), `unused` (other columns of the events),
            `day_first`, `no_products` (items that are left out), `separator` (of the items of a
            cell), and `negative_rating` (None if no rating is negative) of a source with ratings.
    """

    columns: list[dict[str, str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    behaviours: list[dict[str, Any]] = field(default_factory=list)
    rows: int = 0
    split: int = 0
    old: int = 0
    no_products: dict[str, int] = field(default_factory=dict)
    removed: dict[str, Removed] = field(default_factory=dict)
    left: tuple[int, int] = (0, 0)
    mapping: dict[str, Any] = field(default_factory=dict)

    def add(self, rule: str, count: int, examples: Iterable[str] = ()) -> None:
        """Count cases of a rule; examples are only kept if there are cases."""
        if count:
            self.counts[rule] = self.counts.get(rule, 0) + count
            shown = self.examples.setdefault(rule, [])
            shown += list(examples)[: EXAMPLES - len(shown)]

    def remove(
        self,
        rule: str,
        count: int,
        examples: Iterable[str] = (),
        *,
        items: Iterable[Any] | None = (),
        users: int = 0,
        owners: Iterable[str] = (),
    ) -> None:
        """Count events that a rule removes; the arguments are as in `Removed`."""
        if not count:
            return
        self.add(rule, count, examples)
        removed = self.removed.setdefault(rule, Removed(items=None if items is None else set()))
        removed.events += count
        removed.users += users
        removed.owners.update(owners)
        if items is not None and removed.items is not None:
            removed.items.update(items)

    def check_removed(self, user_ids: pa.Array, most: float, decided: Collection[str] = ()) -> None:
        """Refuse to go on where one rule removes more than a share of the events or of the users.

        Args:
            user_ids: users with rows after the rules for single rows.
            most: the share, `data.clean.most_removed`.
            decided: rules of which the settings say what they remove.

        Raises:
            DataError: the message has the numbers, and the settings that decide.
        """
        for removed in self.removed.values():
            owners = pa.array(sorted(removed.owners), pa.string())
            removed.users += len(owners) - (pc.sum(pc.is_in(owners, user_ids)).as_py() or 0)
            removed.owners.clear()
        by_row = sum(self.removed[rule].users for rule in self.removed if rule in BY_ROW)
        users = len(user_ids) + by_row
        for row in self.findings():
            removed = self.removed.get(row["rule"], Removed())
            rule, share = RULES[row["rule"]], removed.users / max(users, 1)
            if not rule.by_users:
                share = max(share, removed.events / max(self.rows, 1))
            asks = rule.asks and row["rule"] not in decided
            if not asks or share <= max(most, rule.most):
                continue
            lost = f" and all of {removed.users:,} of {users:,} users" if removed.users else ""
            shown = f" (e.g. {'; '.join(row['examples'])})" if row["examples"] else ""
            ignored = "".join(
                f"--set data.columns.{role}=none ignores column {column!r}; "
                for column, role in self._columns_of(rule).items()
            )
            raise DataError(
                f"{removed.events:,} of {self.rows:,} events{lost} would be removed, more than "
                f"data.clean.most_removed={most:g} allows, so nothing is written: "
                f"{removed.events:,} {row['found']}{shown}. See whether that is so, and decide: "
                f"{ignored}{row['otherwise'] or 'correct the file'}; --set "
                "data.clean.most_removed=1 removes them"
            )

    def finish(self, counts: Mapping[str, int], events: int, items: int) -> None:
        """Add what the filters of the settings dropped, and what is used in the end."""
        for rule in FILTERS:
            self.remove(rule, counts.get(rule, 0), items=None)
        self.left = (events, items)

    def accounts(self) -> list[dict[str, Any]]:
        """Every row of the events: read, removed by each rule, and used; `items` may be None."""
        if not self.rows:
            return []
        what = "new events were taken" if self.old else "rows were read"
        read = {"what": what, "events": self.rows - self.split - self.old, "items": None}
        rows: list[dict[str, Any]] = [read]
        if self.old:
            what = "events are of the data before"
            rows.insert(0, {"what": what, "events": self.old, "items": None})
        if self.split:
            what = "rows were added, one for each further item of a cell"
            rows.append({"what": what, "events": self.split, "items": None})
        for name, rule in RULES.items():
            if (removed := self.removed.get(name)) is not None:
                items = None if removed.items is None else len(removed.items)
                rows.append({"what": rule.found, "events": -removed.events, "items": items})
        events, items = self.left
        return [*rows, {"what": "events are used", "events": events, "items": items}]

    def rows_in_words(self) -> str:
        """How many rows of a file were read, and how many each rule left out, as one line.

        >>> report = Report(rows=9)
        >>> report.remove("partial_returns_dropped", 2)
        >>> report.add("ratings_unreadable", 1)
        >>> report.rows_in_words().replace(RULES["partial_returns_dropped"].found, "...")
        '9 rows were read; 2 left out: ...; 1 ratings are not numbers'
        """
        read = self.rows - self.split
        parts = [f"{read:,} rows were read"]
        if self.split:
            parts.append(f"{self.split:,} were added, one for each further item of a cell")
        for name, rule in RULES.items():
            if removed := self.removed.get(name):
                parts.append(f"{removed.events:,} left out: {rule.found}")
        for name in ("quantities_unreadable", "ratings_unreadable"):
            if count := self.counts.get(name):
                parts.append(f"{count:,} {RULES[name].found}")
        return "; ".join(parts)

    def note(self, text: str) -> None:
        """Add a sentence, once."""
        if text not in self.notes:
            self.notes.append(text)

    def findings(self) -> Iterator[dict[str, Any]]:
        """The cases of each rule with its words, in the order of the rules."""
        for name, rule in RULES.items():
            if name in self.counts:
                yield {
                    "rule": name,
                    "count": self.counts[name],
                    "found": rule.found + self._by_columns(rule),
                    "done": rule.done,
                    "otherwise": f"--set {rule.otherwise}" if rule.otherwise else "",
                    "examples": self.examples.get(name, []),
                }

    def _columns_of(self, rule: Rule) -> dict[str, str]:
        """Column -> role of the columns that say which events a rule removes."""
        roles = {c: r.partition(" ")[0] for r, c in self.mapping.get("events", {}).items()}
        return {column: role for column, role in roles.items() if role in rule.roles}

    def _by_columns(self, rule: Rule) -> str:
        columns = self._columns_of(rule)
        return f", by {' and '.join(map(repr, columns))}" if columns else ""

    def in_words(self) -> str:
        """Why rows were left out, as one line, for an error."""
        lines = []
        for row in self.findings():
            if not row["rule"].endswith(("_dropped", "_skipped")):
                continue
            examples = f" (e.g. {'; '.join(row['examples'])})" if row["examples"] else ""
            otherwise = f"; {row['otherwise']}" if row["otherwise"] else ""
            lines.append(f"{row['count']:,} {row['found']}{examples}: {row['done']}{otherwise}")
        return ". ".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "columns": self.columns,
            "behaviours": self.behaviours,
            "accounts": self.accounts(),
            "no_products": self.no_products,
            "findings": list(self.findings()),
            "notes": self.notes,
            "mapping": self.mapping,
        }


def render(document: dict[str, Any], name: str) -> str:
    """A report (`Report.as_json`) as one self-contained HTML page without scripts."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = files("recsys.data").joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(template).render(report=document, name=name)


def show(document: dict[str, Any]) -> None:
    """Print a report (`Report.as_json`) to the terminal (standard error)."""
    from rich.markup import escape
    from rich.table import Table

    from recsys.progress import console, say

    columns = Table(
        "file", "role", "column", "why", "values", title="Columns", title_justify="left"
    )
    for row in document["columns"]:
        columns.add_row(*(escape(row[key]) for key in ("file", "role", "column", "why", "values")))
    if document["columns"]:  # there are none where events are taken from a store
        console.print(columns)
    if document["behaviours"]:
        types = Table("event type", "role", "weight", "events", title_justify="left")
        types.title = "Event types"
        for row in document["behaviours"]:
            types.add_row(
                escape(row["name"]), row["role"], f"{row['weight']:g}", f"{row['events']:,}"
            )
        console.print(types)
    if document["accounts"]:
        accounts = Table("", "events", "items", title="Rows of events", title_justify="left")
        for row in document["accounts"]:
            items = "" if row["items"] is None else f"{row['items']:,}"
            accounts.add_row(row["what"], f"{row['events']:,}", items)
        console.print(accounts)
    findings = Table("cases", "found", "done", title_justify="left")
    findings.add_column("to choose otherwise", overflow="fold")  # settings are to be copied
    findings.title = "Cleaning"
    for row in document["findings"]:
        finding = row["found"]
        if row["examples"]:
            finding += f" (e.g. {'; '.join(row['examples'])})"
        findings.add_row(
            f"{row['count']:,}",
            *(escape(text) for text in (finding, row["done"], row["otherwise"])),
        )
    if document["findings"]:
        console.print(findings)
    for note in document["notes"]:
        say(f"data: {escape(note)}")
