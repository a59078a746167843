"""The report on a shop's export: the columns, what was found, what was done, and how to change it.

It goes to the terminal, to `report.html` beside the data set, and as JSON into the manifest.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from recsys.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Template

EXAMPLES = 3
MOST_TOGETHER = 0.5  # a third returned and cancelled is ordinary in fashion, most of all is not
TEMPLATE = "report.html.jinja"


class Rule(NamedTuple):
    """The words of one rule.

    Attributes:
        found: sentence about what was found.
        done: what was done about it.
        otherwise: the setting that chooses otherwise; empty if there is none.
        asks: whether the run stops where the rule would remove more than `most_removed`. Copies and
            repeated steps are merged, so that no user and no item is lost by it.
        adds: whether its events are added to those of other rules, whose sum is bounded as
            well. Those that follow from what another rule removed are counted there.
        by_users: whether only the share of the users counts, because the events of one user may be
            most of all.
        most: the share up to which the rule never asks, whatever `most_removed` is.
        roles: of the columns that say which events the rule removes.
    """

    found: str
    done: str
    otherwise: str = ""
    asks: bool = True
    adds: bool = True
    by_users: bool = False
    most: float = 0.0
    roles: tuple[str, ...] = ()


_WORDS = tomllib.loads(files("recsys.data").joinpath("report.toml").read_text("utf-8"))
SENTENCES: dict[str, str] = _WORDS.pop("sentences")
RULES = {
    name: Rule(**words | {"roles": tuple(words.get("roles", ()))}) for name, words in _WORDS.items()
}

# The rules for single rows, before there are histories.
BY_ROW = frozenset(name for name in RULES if name.startswith("rows_"))

FILTERS = ("rows_below_min_rating_dropped", "rows_outside_core_dropped")


def sentence(key: str, /, **values: Any) -> str:
    """A sentence of `report.toml`, with values in the place of their names."""
    return SENTENCES[key].format(**values)


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
            `day_first`, `no_products` (items that are left out), `separator` and
            `numbers_of_pieces` (`recsys.data.item_cells.ItemCells`), and `negative_rating` (None if
            no rating is negative) of a source with ratings.
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

    def add_rows(self, rule: str, rows: pa.ChunkedArray, texts: pa.ChunkedArray) -> None:
        """Count the rows (null is false) that are cases of a rule, with their first texts."""
        if count := pc.sum(rows).as_py():
            shown = pc.unique(texts.filter(rows)).slice(0, EXAMPLES).to_pylist()
            self.add(rule, count, [str(text)[:60] for text in shown])

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
        together: dict[str, int] = {}
        for row in self.findings():
            removed = self.removed.get(row["rule"], Removed())
            rule, share = RULES[row["rule"]], removed.users / max(users, 1)
            if not rule.by_users:
                share = max(share, removed.events / max(self.rows, 1))
            asks = rule.asks and row["rule"] not in decided
            if not asks or share <= max(most, rule.most):
                if asks and rule.adds and removed.events and not (rule.most or rule.by_users):
                    otherwise = f" ({row['otherwise']})" if row["otherwise"] else ""
                    together[f"{removed.events:,} {row['found']}{otherwise}"] = removed.events
                continue
            lost = f" and all of {removed.users:,} of {users:,} users" if removed.users else ""
            shown = f" (e.g. {'; '.join(row['examples'])})" if row["examples"] else ""
            ignored = "".join(
                f"--set data.columns.{role}=none ignores column {column!r}; "
                for column, role in self._columns_of(rule).items()
            )
            otherwise = ignored + (row["otherwise"] or "correct the file")
            said = {"rows": self.rows, "lost": lost, "shown": shown, "otherwise": otherwise}
            said |= {"events": removed.events, "most": most, "found": row["found"]}
            raise DataError(sentence("much_removed", **said))
        together_most = max(most, MOST_TOGETHER)
        if sum(together.values()) > together_most * self.rows:
            said = {"events": sum(together.values()), "rows": self.rows, "most": together_most}
            raise DataError(sentence("much_removed_together", found="; ".join(together), **said))

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
        parts = []
        for row in self.accounts()[:-1]:
            left_out = "left out: " if row["events"] < 0 else ""
            parts.append(f"{abs(row['events']):,} {left_out}{row['what']}")
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
                columns = " and ".join(map(repr, self._columns_of(rule)))
                yield {
                    "rule": name,
                    "count": self.counts[name],
                    "found": rule.found + (f", by {columns}" if columns else ""),
                    "done": rule.done,
                    "otherwise": f"--set {rule.otherwise}" if rule.otherwise else "",
                    "examples": self.examples.get(name, []),
                }

    def _columns_of(self, rule: Rule) -> dict[str, str]:
        """Column -> role of the columns that say which events a rule removes."""
        roles = {c: r.partition(" ")[0] for r, c in self.mapping.get("events", {}).items()}
        return {column: role for column, role in roles.items() if role in rule.roles}

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
    return _template().render(report=document, name=name)


@cache  # to compile it takes longer than to fill it
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = files("recsys.data").joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(text)


def show(document: dict[str, Any]) -> None:
    """Print a report (`Report.as_json`) to the terminal (standard error)."""
    from rich.markup import escape
    from rich.table import Table

    from recsys.progress import console, say

    def print_rows(title: str, names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        table = Table(*names, title=title, title_justify="left")
        for row in rows:
            table.add_row(*map(escape, row))
        table.columns[-1].overflow = "fold"  # settings are to be copied
        if table.row_count:
            console.print(table)

    names = ("file", "role", "column", "why", "values")
    print_rows("Columns", names, ([row[n] for n in names] for row in document["columns"]))
    types = document["behaviours"]
    print_rows(
        "Event types",
        ("event type", "role", "weight", "events"),
        ((t["name"], t["role"], f"{t['weight']:g}", f"{t['events']:,}") for t in types),
    )
    accounts = [
        (row["what"], *("" if row[n] is None else f"{row[n]:,}" for n in ("events", "items")))
        for row in document["accounts"]
    ]
    print_rows("Rows of events", ("", "events", "items"), accounts)
    findings = []
    for row in document["findings"]:
        examples = f" (e.g. {'; '.join(row['examples'])})" if row["examples"] else ""
        cells = (row["found"] + examples, row["done"], row["otherwise"])
        findings.append((f"{row['count']:,}", *cells))
    print_rows("Cleaning", ("cases", "found", "done", "to choose otherwise"), findings)
    for note in document["notes"]:
        say(f"data: {escape(note)}")
