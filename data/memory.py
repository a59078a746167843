"""Prepares data in memory: filters, cleans and splits the events of a source."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recsys.data import filtering
from recsys.data.histories import Facts, HistoryCleaner, disliked_table, pieces_table
from recsys.data.raw import EVENT_COLUMNS, RawData, numbered
from recsys.data.report import Report
from recsys.data.rules import Rules, Split, by_time, decided_rules, in_baskets, too_few
from recsys.dataset import Dataset, Disliked
from recsys.errors import ConfigError
from recsys.interactions import Behaviour, Interactions
from recsys.splits import (
    ENOUGH_USERS,
    dates_of_shares,
    global_temporal,
    label_baskets,
    label_last_targets,
    leave_one_out,
    starts_session,
    tied_events,
    users_to_ask,
)


class Prepared(NamedTuple):
    """A data set in memory.

    Attributes:
        dataset: the canonical data.
        split: the kind of split that was used.
        decisions: the count of each decision that was taken; zero counts are omitted.
        report: of a source that was cleaned.
    """

    dataset: Dataset
    split: Split
    decisions: dict[str, int]
    report: Report | None = None


def prepare(raw: RawData, rules: Rules) -> Prepared:
    """Filter and split the events of a source.

    Raises:
        ConfigError: a rule that cannot be applied to this source.
        DataError: no rows are left.
    """
    raw = filtering.in_time_order(raw)
    behaviours: tuple[Behaviour, ...] = ()
    disliked: Disliked | None = None
    pieces: pa.Table | None = None
    if raw.report is None:
        raw = filtering.drop_duplicates(raw, rules.duplicates)
    else:
        raw, behaviours, disliked, pieces = _clean_histories(raw, rules)
    if rules.min_rating is not None:
        raw = filtering.drop_ratings_below(raw, rules.min_rating)
    if rules.k_core:
        raw = filtering.k_core(raw, rules.k_core)
    if rules.min_length:
        raw = filtering.drop_short(raw, rules.min_length)
    interactions = _interactions(raw, with_types=bool(behaviours))
    split = rules.split or _default_split(interactions, raw, rules, behaviours)
    baskets = ""
    times = interactions.user, interactions.timestamp, interactions.nanosecond
    if raw.report is not None and interactions.has_time:
        tied = tied_events(*times)
        baskets = in_baskets(tied, len(interactions))
    if baskets and raw.report is not None:
        raw.report.note(baskets)
    labels = _labels(interactions, raw.events, split, rules, behaviours)
    if baskets and split == "leave-one-out" and not behaviours and not raw.sessions:
        labels = label_baskets(*times)
    dataset = Dataset(
        interactions, labels, raw.items, raw.codes, behaviours, disliked, raw.sessions,
        pieces, bool(baskets),
    )  # fmt: skip
    if raw.report is not None:
        raw.report.finish(raw.counts, len(interactions), len(np.unique(interactions.item)))
    counts = raw.counts | (raw.report.counts if raw.report else {})
    decisions = {name: count for name, count in counts.items() if count}
    return Prepared(dataset, split, decisions, raw.report)


def _clean_histories(
    raw: RawData, rules: Rules
) -> tuple[RawData, tuple[Behaviour, ...], Disliked | None, pa.Table | None]:
    """Apply the rules for whole histories, and drop duplicates, to events in time order."""
    report = raw.report or Report()
    report.rows = report.rows or len(raw.events)
    facts = _facts(raw)
    cleaner = HistoryCleaner(facts, rules.clean, raw.behaviours, rules.roles, report)
    ids = {name: numbered(raw.events[name])[0] for name in ("user", "item")}
    raw = filtering.only(raw, cleaner.wanted(ids), "events_of_bots_dropped")
    before = len(raw.events)
    raw = filtering.drop_duplicates(raw, rules.duplicates)
    report.remove("duplicate_rows_dropped", before - len(raw.events), items=None)
    columns = filtering.as_arrays(raw.events)
    report.add("events_at_the_same_time", filtering.ties(columns))
    cleaned, keep, negative, left = cleaner.clean(columns)
    events = raw.events
    known = [numbered(events[name])[1] for name in ("user", "item")]
    disliked = Disliked(disliked_table(negative, *known)) if len(negative["user"]) else None
    pieces = pieces_table(left, *known) if len(left["user"]) else None
    for name in ("behaviour", "rating"):
        if name in cleaned and name in events.column_names:
            place = events.column_names.index(name)
            events = events.set_column(place, name, pa.array(cleaned[name], EVENT_COLUMNS[name]))
    if "behaviour" in events.column_names and not cleaner.behaviours:
        events = events.drop_columns("behaviour")
    report.check_removed(facts.user_ids, rules.clean.most_removed, decided_rules(rules))
    if "quantity" in events.column_names:
        events = events.drop_columns("quantity")
    raw = filtering.only(replace(raw, events=events), keep, "negative_events_dropped")
    return raw, cleaner.behaviours, disliked, pieces


def _facts(raw: RawData) -> Facts:
    """Facts about all events, which are in time order."""
    user, user_ids = numbered(raw.events["user"])
    pairs = pa.table({"user": user, "kind": np.zeros(len(user), np.uint8)})
    if "behaviour" in raw.events.column_names:
        pairs = pairs.set_column(1, "kind", raw.events["behaviour"])
    counted = pairs.group_by(["user", "kind"]).aggregate([([], "count_all")])
    found = (counted[name].to_numpy() for name in ("user", "kind", "count_all"))
    ratings = np.zeros(0, np.float32)
    if "rating" in raw.events.column_names:
        ratings = pc.unique(raw.events["rating"].drop_null()).to_numpy()
    return Facts.of(user_ids, tuple(found), ratings, len(raw.behaviours))


def _interactions(raw: RawData, *, with_types: bool) -> Interactions:
    """The events of a source, which are in time order, with dense users and items."""
    events = raw.events
    user, user_ids = numbered(events["user"])
    item, found = numbered(events["item"])
    item_ids = raw.items["item_id"].combine_chunks()
    place = np.asarray(pc.index_in(found, value_set=item_ids), np.int32)
    has_time = "timestamp" in events.column_names
    rating = np.full(len(user), np.nan, np.float32)
    if "rating" in events.column_names:
        rating = events["rating"].to_numpy().astype(np.float32)
    return Interactions(
        user.astype(np.int32),
        place[item],
        events["timestamp"].to_numpy()
        if has_time
        else np.arange(len(user)) - np.searchsorted(user, user),
        rating,
        np.asarray(user_ids.to_pylist(), np.str_),
        np.asarray(item_ids.to_pylist(), np.str_),
        has_time,
        events["behaviour"].to_numpy() if with_types else None,
        events["nanosecond"].to_numpy() if "nanosecond" in events.column_names else None,
    )


def _default_split(
    interactions: Interactions,
    raw: RawData,
    rules: Rules,
    behaviours: tuple[Behaviour, ...],
) -> Split:
    """The source's own split; by time for an export with enough users; else leave-one-out."""
    if "split" in raw.events.column_names:
        return "own"
    if raw.report is None or not interactions.has_time:
        return "leave-one-out"
    labels = _labels(interactions, raw.events, "global-temporal", rules, behaviours)
    target = _targets(interactions, behaviours)
    target &= ~starts_session(interactions.user, raw.sessions)
    asked = users_to_ask(interactions.user, labels, target)
    if asked.min() >= ENOUGH_USERS:
        dates = rules.dates or dates_of_shares(interactions.timestamp, rules.ratio)
        raw.report.note(by_time(asked, dates, raw.sessions))
        return "global-temporal"
    raw.report.note(too_few(asked))
    return "leave-one-out"


def _targets(interactions: Interactions, behaviours: tuple[Behaviour, ...]) -> NDArray[np.bool_]:
    """(n,) whether each event is a target."""
    if interactions.behaviour is None:
        return np.ones(len(interactions), bool)
    return np.array([b.role == "target" for b in behaviours])[interactions.behaviour]


def _labels(
    interactions: Interactions,
    events: pa.Table,
    split: Split,
    rules: Rules,
    behaviours: tuple[Behaviour, ...],
) -> NDArray[np.uint8]:
    """(n,) labels."""
    if split == "own":
        if "split" not in events.column_names:
            raise ConfigError("data.split: this source has no split of its own")
        own: NDArray[np.uint8] = events["split"].to_numpy().astype(np.uint8)
        return own
    if split == "leave-one-out":
        if interactions.behaviour is None:
            return leave_one_out(interactions)
        return label_last_targets(interactions.user, _targets(interactions, behaviours))
    try:
        return global_temporal(interactions, rules.ratio, rules.dates)
    except ValueError as error:
        raise ConfigError(f"data.split: {error}") from error
