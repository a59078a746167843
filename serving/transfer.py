"""Export and import of events and erasures as NDJSON or parquet, streamed.

Erasures come first, so what they erase does not return: in NDJSON a line each, in parquet in the
metadata of the file. Another row is an event as in `POST /v1/events`, with two more columns:
`digest` (by which repeated events are recognised) and `seed` (the data set that it was imported
from). Every exported event has an id, so an interrupted import can be repeated.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from recsys.errors import DataError
from recsys.progress import Bar, track
from recsys.serving.bodies import MalformedError, parse
from recsys.serving.schemas.events import ErasureRow, StoredEventRow
from recsys.serving.stores.records import Appended, Erasure, EventConflictError, StoredEvent, now_ms
from recsys.serving.stores.store import Store

CHUNK = 5_000
TEXTS = (".ndjson", ".jsonl")
ERASURES = b"recsys.erasures"  # key of the metadata of a parquet file
Row = ErasureRow | StoredEventRow
COLUMNS = pa.schema(
    [
        ("event_id", pa.string()),
        ("user", pa.string()),
        ("item", pa.string()),
        ("type", pa.string()),
        ("timestamp", pa.float64()),
        ("value", pa.float64()),
        ("recommendation_id", pa.string()),
        ("digest", pa.string()),
        ("seed", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Imported(Appended):
    """Outcome of a file.

    Attributes:
        seeded: number of events of a data set, left out because the store has imported one itself.
        erasures: number of erasures that the store did not know.
    """

    seeded: int = 0
    erasures: int = 0


def export_events(store: Store, path: Path) -> int:
    """Write all events and erasures to a file, atomically; returns the number of events.

    Raises:
        DataError: the suffix of the file is unknown, or it is a folder.
    """
    is_text = _is_text(path)
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a file in it")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with track("export", store.history.count()) as bar:
            rows = _counted(store.history.dump(), bar)
            count = _write_text(partial, rows) if is_text else _write_parquet(partial, rows)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return count


async def import_events(store: Store, path: Path) -> Imported:
    """Take over the erasures of a file, and append its events; stored ones are skipped.

    Raises:
        DataError: a row is malformed, or an event is stored with other content; earlier rows are
            written.
    """
    was_seeded = bool(store.history.seeds())
    totals: Counter[str] = Counter()
    seeds: Counter[str] = Counter()
    try:
        size = path.stat().st_size if _is_text(path) else pq.read_metadata(path).num_rows
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: {error}") from error
    read = _read_text(path) if _is_text(path) else _read_parquet(path)
    with track("import", size) as bar:
        while chunk := list(islice(read, CHUNK)):
            erasures = [row.to_erasure() for row, _ in chunk if isinstance(row, ErasureRow)]
            events = [row for row, _ in chunk if isinstance(row, StoredEventRow)]
            if erasures:
                totals["erasures"] += store.history.add_erasures(erasures)
            rows = [row for row in events if row.seed is None or not was_seeded]
            totals["seeded"] += len(events) - len(rows)
            seeds.update(row.seed for row in rows if row.seed is not None)
            now = now_ms()
            try:
                totals.update(
                    asdict(await store.history.append([row.to_event(now) for row in rows]))
                )
            except EventConflictError as error:
                raise DataError(f"{path}: {error}") from error
            bar.advance(sum(size for _, size in chunk))
    if seeds:
        await store.history.mark_seeded(seeds)
    return Imported(**totals)


def _is_text(path: Path) -> bool:
    if path.suffix in TEXTS:
        return True
    if path.suffix == ".parquet":
        return False
    raise DataError(f"{path}: the name must end with .ndjson, .jsonl or .parquet")


def _row(row: Erasure | StoredEvent) -> dict[str, Any]:
    if isinstance(row, Erasure):
        return {"erased": row.user_hash, "timestamp": row.erased_ms / 1000, "salt": row.salt}
    event = row
    return {
        # an event of a data set gets an id that is the same in every export
        "event_id": event.event_id or f"seed-{str(event.seed)[:16]}-{event.place}",
        "user": event.user,
        "item": event.item,
        "type": event.type,
        "timestamp": event.time_ms / 1000,
        "value": event.value,
        "recommendation_id": event.recommendation_id,
        "digest": event.digest,
        "seed": event.seed,
    }


def _counted(rows: Iterable[Erasure | StoredEvent], bar: Bar) -> Iterator[Erasure | StoredEvent]:
    for row in rows:
        yield row
        if isinstance(row, StoredEvent):
            bar.advance()


def _write_text(path: Path, rows: Iterable[Erasure | StoredEvent]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            given = {name: value for name, value in _row(row).items() if value is not None}
            file.write(json.dumps(given, ensure_ascii=False) + "\n")
            count += isinstance(row, StoredEvent)
        file.flush()
        os.fsync(file.fileno())
    return count


def _write_parquet(path: Path, rows: Iterator[Erasure | StoredEvent]) -> int:
    count = 0
    erasures: list[dict[str, Any]] = []
    with pq.ParquetWriter(path, COLUMNS) as writer:
        while chunk := list(islice(rows, 20 * CHUNK)):
            events = [_row(row) for row in chunk if isinstance(row, StoredEvent)]
            erasures += [_row(row) for row in chunk if isinstance(row, Erasure)]
            writer.write_table(pa.Table.from_pylist(events, COLUMNS))
            count += len(events)
        writer.add_key_value_metadata({ERASURES: json.dumps(erasures).encode()})
    return count


def _read_text(path: Path) -> Iterator[tuple[Row, int]]:
    """Rows, each with its size in bytes."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _checked(path, f"line {number}", line), len(line)


def _read_parquet(path: Path) -> Iterator[tuple[Row, int]]:
    """Rows, each with size 1."""
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            erasures = (file.metadata.metadata or {}).get(ERASURES, b"[]")
            for row in json.loads(erasures):
                yield _checked(path, "metadata", row), 0
            for batch in file.iter_batches(CHUNK):
                for row in batch.to_pylist():
                    number += 1
                    given = {name: value for name, value in row.items() if value is not None}
                    yield _checked(path, f"row {number}", given), 1
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataError(f"{path}, after row {number}: {error}") from error


def _checked(path: Path, where: str, row: bytes | dict[str, Any]) -> Row:
    try:
        value = parse(row) if isinstance(row, bytes) else row
        kind = ErasureRow if isinstance(value, dict) and "erased" in value else StoredEventRow
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the row"
        raise DataError(f"{path}, {where}, {field}: {first['msg']}") from error
    except MalformedError as error:
        raise DataError(f"{path}, {where}: {error}") from error
