"""Where a shop's events and items come from: files, SQL queries, tables in memory.

It only finds or writes the files that the reader `table` then reads; it knows nothing of what their
columns mean. Results of queries and tables in memory are written as Parquet files to
`$RECSYS_HOME/raw/NAME`, completely or not at all.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from recsys.artifacts import Workspace
from recsys.data.column_words import words
from recsys.errors import ConfigError, DataError, RecsysError
from recsys.progress import say
from recsys.raw_files import find_raw

if TYPE_CHECKING:  # reading files needs neither
    import pyarrow as pa

SUFFIXES = (".csv", ".tsv", ".txt", ".parquet", ".jsonl", ".ndjson", ".json", ".xlsx")
PACKED = (".gz",)
# Words in the name of a file that say what it holds.
EVENT_WORDS, ITEM_WORDS = words("files_of_events"), words("files_of_items")
ROWS = 100_000  # of a query's result that are held in memory
ORIGIN = b"recsys.origin"  # key of the hash of database and query in a written file


@dataclass(frozen=True)
class Tables:
    """The files of a shop.

    Attributes:
        events: a file, or a folder of files.
        items: the file that describes the items, or None.
    """

    events: Path
    items: Path | None = None


def is_url(text: str) -> bool:
    """Whether a source is the SQLAlchemy URL of a database and not a path.

    Raises:
        ConfigError: the URL of an object store.
    """
    if text.startswith(("s3://", "gs://", "az://", "abfss://")):
        raise ConfigError(
            f"{text.partition('?')[0]!r}: objects are copied by their store's own tool first, for "
            "example `aws s3 cp URL .`, `gcloud storage cp URL .` or `rclone copy`"
        )
    return "://" in text


def name_of(source: str) -> str:
    """A plain word for the name of a run, from the name of its file, folder or database.

    >>> name_of("exports/Große Bestellungen.csv.gz"), name_of("sqlite:///shop.db?timeout=3")
    ('grosse-bestellungen', 'shop')
    """
    if "://" in source:  # only the database or key: what stands before it may hold a password
        path = re.sub(r"^[^:]*://[^/]*/?|[?#].*", "", source)
    else:
        path = str(Path(source).absolute())
    stem = Path(path).name.partition(".")[0]
    letters = unicodedata.normalize("NFKD", stem.casefold())
    ascii_only = letters.encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9_]+", "-", ascii_only).strip("-") or "shop"


def find_tables(events: str, items: str | None = None) -> Tables:
    """Find the files that a command names, as absolute paths.

    A folder is read as a folder of events, unless the names of its files tell the events from the
    items (`orders.csv`, `products.csv`).

    Raises:
        ConfigError: a path that does not exist, or a folder whose files cannot be told apart.
    """
    events_path = _find("EVENTS", events)
    described = items and _find("--items", items)
    if not events_path.is_dir():
        return Tables(events_path, described or None)
    if described and described.parent != events_path:
        return Tables(events_path, described)
    return _take_apart(events_path, described or None)


def _take_apart(folder: Path, named: Path | None) -> Tables:
    """Events and items of a folder, by the names of its files; the items may be `named`."""
    files = _files(folder)
    if not files:
        raise ConfigError(f"EVENTS: {folder} has no files of {', '.join(SUFFIXES)}")
    events = [file for file in files if _words(file) & EVENT_WORDS and file != named]
    items = [file for file in files if _words(file) & ITEM_WORDS and file not in events]
    if named is not None:
        items = [named]
    if not items:
        return Tables(folder)
    if len(files) == 2 and not events:
        events = [file for file in files if file not in items]
    if len(items) != 1 or len(events) != 1:
        raise ConfigError(
            f"EVENTS: {folder} has {', '.join(file.name for file in files)}; name the file of "
            f"events and the file of items: recsys run {folder / 'EVENTS'} --items "
            f"{folder / 'ITEMS'} (many files of events need a folder of their own)"
        )
    ignored = [file.name for file in files if file not in (*events, *items)]
    say(
        f"events: {events[0].name}, items: {items[0].name}"
        + (f"; not read: {', '.join(ignored)}" if ignored else "")
    )
    return Tables(events[0], items[0])


def _files(folder: Path) -> list[Path]:
    return [
        file
        for file in sorted(folder.iterdir())
        if file.is_file() and not file.name.startswith(".") and _suffix(file) in SUFFIXES
    ]


def _suffix(file: Path) -> str:
    return (Path(file.stem) if file.suffix in PACKED else file).suffix.lower()


def _words(file: Path) -> set[str]:
    return set(re.split(r"[^a-z]+", file.name.partition(".")[0].lower()))


def _find(option: str, path: str) -> Path:
    own = Path(path).expanduser()
    existing = own if own.exists() else find_raw(own)
    if existing is None:
        raise ConfigError(
            f"{option}: {path!r} is no file or folder in {Path.cwd()}; give a csv, tsv, parquet, "
            "jsonl or xlsx file, a folder of them, or the URL of a database with --query"
        )
    return existing.absolute()


def export_queries(
    url: str, name: str, *, query: str | None, items_query: str | None, force: bool = False
) -> Tables:
    """Write the results of SQL queries to the raw folder of run `name`.

    The URL is given to SQLAlchemy and is stored nowhere; a hash of database and query is, so that
    another query does not replace the data set of this one.

    Raises:
        ConfigError: no query, a driver is not installed, or the folder holds the result of another
            query and `force` is not given.
        DataError: the database refuses the connection or the query.
    """
    if query is None:
        raise ConfigError(
            "--query: a database needs one, for example "
            "--query 'SELECT customer_id, sku, ts FROM events ORDER BY ts'"
        )
    from sqlalchemy import create_engine
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import SQLAlchemyError

    try:
        parsed = make_url(url)
        engine = create_engine(parsed, hide_parameters=True)
    except (SQLAlchemyError, ImportError, ValueError):
        # Messages of these errors may repeat the URL and its password.
        raise ConfigError(
            "EVENTS: SQLAlchemy cannot open this URL; it has the form "
            "dialect+driver://user:password@host/database, and the driver must be installed"
        ) from None
    file = str(parsed.database or ":memory:")
    is_file = parsed.get_backend_name() == "sqlite" and not file.startswith((":memory:", "file:"))
    if is_file and not Path(file).is_file():  # SQLite would make an empty one
        raise DataError(f"EVENTS: there is no SQLite file {file}")
    database = f"{parsed.get_backend_name()}://{parsed.host}:{parsed.port}/{parsed.database}"
    try:
        written = {
            part: _write(name, part, _run_query(engine, text), f"{database}\n{text}", force=force)
            for part, text in (("events", query), ("items", items_query))
            if text is not None
        }
    except RecsysError:
        raise
    except (SQLAlchemyError, TypeError, ValueError) as error:  # drivers raise the other two
        cause = str(getattr(error, "orig", None) or type(error).__name__).partition("\n")[0]
        raise DataError(f"--query: the database refuses it: {cause}") from None
    finally:
        engine.dispose()
    return Tables(written["events"], written.get("items"))


def _run_query(engine: Any, query: str) -> Iterator[pa.Table]:
    """The rows of a query, some at a time; the first ones determine the types."""
    import pyarrow as pa
    from sqlalchemy import text

    schema: pa.Schema | None = None
    with engine.connect() as connection:
        result = connection.execution_options(stream_results=True).execute(text(query))
        if not result.returns_rows:
            raise DataError("--query: it gives no rows, so it is not run; write a SELECT")
        names = list(result.keys())
        rows = result.fetchmany(ROWS)
        while rows or schema is None:
            columns = list(zip(*rows, strict=True)) or [()] * len(names)
            arrays = [_column(name, values) for name, values in zip(names, columns, strict=True)]
            table = pa.table(arrays, names)
            if schema is None:
                schema = table.schema
            try:
                yield table.cast(schema)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise DataError(f"--query: a column changes its type: {error}; cast it") from error
            rows = result.fetchmany(ROWS)


def _column(name: str, values: Iterable[Any]) -> pa.Array:
    import pyarrow as pa

    plain = [_exact(value) for value in values]
    try:
        array = pa.array(plain)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        array = pa.array([None if value is None else str(value) for value in plain])
    if pa.types.is_null(array.type):
        return array.cast(pa.string())
    types = pa.types
    known = types.is_primitive, types.is_string, types.is_list
    if not any(is_known(array.type) for is_known in known):
        raise DataError(f"--query: column {name!r} has values of type {array.type}; cast it")
    return array


def _exact(value: Any) -> Any:
    """Numbers of any length, UUIDs and bytes as texts; everything else as it is."""
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, (bytes, bytearray, memoryview)):
        from recsys.data.texts import bytes_as_text

        return bytes_as_text(bytes(value))
    return str(value) if isinstance(value, UUID) else value


def export_tables(events: Any, items: Any | None, name: str, *, force: bool = False) -> Tables:
    """Paths as they are; tables in memory are written to the raw folder of run `name`.

    Args:
        events: a path, or a table that exports Arrow data (pandas, polars, pyarrow, DuckDB, ...).
        items: the same, or None.
        name: of the run.
        force: replace what was written under this name from another source.

    Raises:
        ConfigError: neither a path nor a table, or events with other columns than those that were
            given under this name before.
        DataError: a table with values that Arrow cannot hold.
    """

    def place(part: str, table: Any) -> Path:
        if isinstance(table, (str, Path)):
            return _find(part, str(table))
        made = _as_arrow(part, table)
        if not force:
            _compare(name, part, made)
        return _write(name, part, iter([made]), "memory", force=force)

    described = None if items is None else place("items", items)
    if isinstance(events, (str, Path)):
        return find_tables(str(events), None if described is None else str(described))
    return Tables(place("events", events), described)


def _compare(name: str, part: str, made: pa.Table) -> None:
    """Refuse events of other columns than those that a run had before; tell of other changes."""
    import pyarrow.parquet as pq

    path = _raw(name) / f"{part}.parquet"
    if not path.is_file():
        return
    before = pq.read_schema(path).names
    if part == "events" and set(before) != set(made.column_names):
        raise ConfigError(
            f"name {name!r} has events with the columns {', '.join(before)}, and these have "
            f"{', '.join(made.column_names)}; choose another name, or replace them with force=True"
        )
    if before != made.column_names or not pq.read_table(path).equals(made):
        rows = pq.read_metadata(path).num_rows
        say(
            f"{part}: {made.num_rows:,} rows replace the {rows:,} that were given as {name!r} "
            "before, and its data and models are made again"
        )


def _as_arrow(part: str, table: Any) -> pa.Table:
    import pyarrow as pa

    if not hasattr(table, "__arrow_c_stream__"):
        raise ConfigError(
            f"{part}: expected a path or a table with __arrow_c_stream__, as pandas, polars and "
            f"pyarrow have, found {type(table).__name__}"
        )
    try:
        made = pa.table(table)
    except (pa.ArrowException, ValueError) as error:
        raise DataError(f"{part}: Arrow cannot hold this table: {error}") from error
    # The index of a pandas frame is no column of the shop, unless it has a name.
    names = [n for n in made.column_names if not re.fullmatch(r"__index_level_\d+__", n)]
    return made.select(names).replace_schema_metadata(None)


def _raw(name: str) -> Path:
    """The folder of what is written for run `name`."""
    return Workspace.of(name).home / "raw" / name


def _write(name: str, part: str, tables: Iterator[pa.Table], origin: str, *, force: bool) -> Path:
    """Write `part`.parquet of run `name`, completely or not at all."""
    import pyarrow.parquet as pq

    path = (_raw(name) / f"{part}.parquet").absolute()
    digest = hashlib.sha256(origin.encode()).hexdigest()[:16].encode()
    if path.is_file() and not force and (pq.read_schema(path).metadata or {}).get(ORIGIN) != digest:
        raise ConfigError(
            f"{path} has the result of another query or another source; take another --name, or "
            "replace it with --force"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}~")
    writer, rows = None, 0
    try:
        for table in tables:
            rows += table.num_rows
            schema = table.schema.with_metadata({ORIGIN: digest})
            writer = writer or pq.ParquetWriter(temporary, schema)
            writer.write_table(table.replace_schema_metadata(schema.metadata))
        if writer is None or not rows:
            raise DataError(f"{part}: no rows")
        writer.close()
        temporary.replace(path)
    finally:
        if writer is not None:
            writer.close()
        temporary.unlink(missing_ok=True)
    return path
