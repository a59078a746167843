"""Export and import of events and erasures as lines of JSON, streamed.

Erasures come first, so what they erase does not return. Another line is an event as in
`POST /v1/events`, with two more fields: `digest` (by which repeated events are recognised) and
`seed` (the data set that it was imported from). Every exported event has an id, so an interrupted
import can be repeated.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from recsys.errors import DataError
from recsys.progress import track
from recsys.serving.bodies import MalformedError, parse
from recsys.serving.schemas.events import ErasureRow, StoredEventRow
from recsys.serving.stores.records import (
    Appended,
    Erasure,
    EventConflictError,
    StoredEvent,
    now_ms,
)
from recsys.serving.stores.store import Store

CHUNK = 5_000
Row = ErasureRow | StoredEventRow


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
        DataError: it is a folder.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a file in it")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    count = 0
    try:
        with (
            track("export", store.history.count()) as bar,
            partial.open("w", encoding="utf-8") as file,
        ):
            for row in store.history.dump():
                fields = {name: value for name, value in _fields(row).items() if value is not None}
                file.write(json.dumps(fields, ensure_ascii=False) + "\n")
                if isinstance(row, StoredEvent):
                    count += 1
                    bar.advance()
            file.flush()
            os.fsync(file.fileno())
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
    read = _read(path)
    with track("import", path.stat().st_size) as bar:
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


def _fields(row: Erasure | StoredEvent) -> dict[str, Any]:
    if isinstance(row, Erasure):
        return {"erased": row.user_hash, "timestamp": row.erased_ms / 1000, "salt": row.salt}
    return {
        # an event of a data set gets an id that is the same in every export
        "event_id": row.event_id or f"seed-{str(row.seed)[:16]}-{row.place}",
        "user": row.user,
        "item": row.item,
        "type": row.type,
        "timestamp": row.time_ms / 1000,
        "value": row.value,
        "recommendation_id": row.recommendation_id,
        "digest": row.digest,
        "seed": row.seed,
    }


def _read(path: Path) -> Iterator[tuple[Row, int]]:
    """Rows, each with its size in bytes."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _checked(path, number, line), len(line)


def _checked(path: Path, number: int, line: bytes) -> Row:
    try:
        value = parse(line)
        kind = ErasureRow if isinstance(value, dict) and "erased" in value else StoredEventRow
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the row"
        raise DataError(f"{path}, line {number}, {field}: {first['msg']}") from error
    except MalformedError as error:
        raise DataError(f"{path}, line {number}: {error}") from error
