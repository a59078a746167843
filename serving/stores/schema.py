"""The tables of a store, for SQLite and PostgreSQL. Times are unix milliseconds."""

from typing import Any

import sqlalchemy as sa
from sqlalchemy import REAL, BigInteger, Column, Double, Index, Integer, MetaData, Table, Text

SCHEMA_VERSION = 11  # a value of STATE
METADATA = MetaData()
# Ids are compared byte by byte, as in SQLite, whatever the locale of a PostgreSQL database.
ID = Text().with_variant(Text(collation="C"), "postgresql")
NUMBER = BigInteger().with_variant(Integer(), "sqlite")  # 64 bits in both
VALUE = Double().with_variant(REAL(), "sqlite")


def _table(name: str, *contents: Column[Any] | Index) -> Table:
    return Table(name, METADATA, *contents, sqlite_strict=True)


EVENTS = _table(
    "events",
    Column("id", NUMBER, primary_key=True),  # order of arrival, which breaks ties of time
    Column("event_id", ID),
    Column("user_id", ID, nullable=False),
    Column("item_id", ID, nullable=False),
    Column("type", Text, nullable=False),
    Column("time_ms", NUMBER, nullable=False),
    Column("value", VALUE),
    Column("recommendation_id", ID),
    Column("linked", Integer),  # 1: the recommendation was remembered
    Column("digest", Text),
    Column("seed", Text),  # digest of the data set that it was imported from
    Index("events_by_user", "user_id", "time_ms", "id"),
    Index("events_by_event_id", "event_id", unique=True),
)
FEEDBACK = EVENTS.c.recommendation_id.is_not(None)
UNCOUNTED = ("feedback", "impression", "remove_from_cart", "skip")  # often most of a user's events
# Written out in queries as in the index: databases find it by that.
TYPES = sa.bindparam(None, UNCOUNTED, expanding=True, literal_execute=True)
COUNTED = EVENTS.c.type.not_in(TYPES)
for name_, columns_, where_, dialect_ in (
    ("events_by_answer", ("recommendation_id", "user_id", "type", "time_ms"), FEEDBACK, None),
    # SQLite reads histories from the index alone; PostgreSQL has no index entries over 2.7 kB.
    ("events_of_histories", ("user_id", "time_ms", "id", "item_id", "type"), COUNTED, "sqlite"),
    ("events_counted", ("user_id", "time_ms", "id"), COUNTED, "postgresql"),
):
    keys_ = [EVENTS.c[name] for name in columns_]
    Index(name_, *keys_, sqlite_where=where_, postgresql_where=where_).ddl_if(dialect=dialect_)
EVENT_COLUMNS = tuple(column.name for column in EVENTS.columns)[1:]  # without the id

# Users whose events were erased, by a hash with the salt in STATE.
ERASURES = _table(
    "erasures",
    Column("salted_hash", Text, primary_key=True),
    Column("erased_ms", NUMBER, nullable=False),
)

RECOMMENDATIONS = _table(
    "recommendations",
    Column("id", NUMBER, primary_key=True),
    Column("recommendation_id", ID, nullable=False, unique=True),
    Column("user_id", ID),
    Column("model", Text, nullable=False),
    Column("items", Text, nullable=False),  # JSON
    Column("time_ms", NUMBER, nullable=False),
    Index("recommendations_by_user", "user_id"),
)

EXPOSURES = _table(
    "exposures",
    Column("id", NUMBER, primary_key=True),
    Column("experiment", Text, nullable=False),
    Column("user_id", ID, nullable=False),
    Column("arm", Text, nullable=False),
    Column("recommendation_id", ID, nullable=False),
    Column("time_ms", NUMBER, nullable=False),
    Index("exposures_by_experiment", "experiment", "user_id", "time_ms"),
    Index("exposures_by_user", "user_id"),
)

JOURNAL = _table(
    "journal",
    Column("id", NUMBER, primary_key=True),
    Column("model", Text, nullable=False),
    Column("key", Text),  # of the item that a record is about
    Column("record", Text, nullable=False),  # JSON
    Index("journal_by_model", "model", "id"),
    Index("journal_by_key", "model", "key"),
)

STATE = _table(
    "state",
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),  # JSON
)
