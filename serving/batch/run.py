"""Run a job: score the missing parts, here or on Ray, and complete the output."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from recsys.artifacts import MANIFEST, read_manifest
from recsys.progress import say, track
from recsys.serving.batch.job import Job
from recsys.serving.batch.output import Output
from recsys.serving.cluster.ray import import_ray, start_ray


@dataclass(frozen=True)
class Summary:
    """Summary of a run: what is in the output, and what this run scored.

    Attributes:
        seconds: duration, with the loading of the bundle.
    """

    out: str
    digest: str
    users: int
    parts: int
    scored: int
    seconds: float


def score(
    job: Job,
    out: Path,
    *,
    engine: Literal["local", "ray"] = "local",
    workers: int = 1,
    gpus: float = 0.0,
    force: bool = False,
) -> Summary:
    """Score the users of a job, except those of complete parts.

    With `force`, the output of another plan is deleted.

    Raises:
        ArtifactError: the bundle is damaged; `out` is in use or holds other files.
        DataError: the users' file is malformed.
        ConfigError: the request is not valid, or Ray is not installed.
    """
    start = time.perf_counter()
    output = Output(out, job)
    with output.opened(force=force) as missing:
        total = len(job.source)
        rows = sum(stop - first for first, stop in map(job.rows, missing))
        if not missing and (out / MANIFEST).is_file():
            say(f"{out} is up to date.")
            digest = read_manifest(out).digest
            return Summary(str(out), digest, total, job.parts, 0, _since(start))
        if rows < total:
            say(f"{total - rows:,} of {total:,} users are done; continuing with the others.")
        if engine == "ray":
            done = on_ray(job, missing, workers, gpus)
        else:
            done = in_this_process(job, missing)
        with track("users", total) as bar:
            bar.advance(total - rows)
            for part, table in done if missing else ():
                output.write(part, table)
                bar.advance(len(table))
        digest = output.finish().digest
        return Summary(str(out), digest, total, job.parts, rows, _since(start))


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 3)


# Ways to score parts: each yields (part, table) in any order.


def in_this_process(job: Job, parts: Sequence[int]) -> Iterator[tuple[int, pa.Table]]:
    """Score in this process, one part after the other."""
    from recsys.serving.batch.scoring import Scorer

    scorer = Scorer(job)
    for part in parts:
        yield part, scorer.part(part)


def on_ray(
    job: Job, parts: Sequence[int], workers: int, gpus: float = 0.0
) -> Iterator[tuple[int, pa.Table]]:
    """Score in actors of a Ray cluster: that of `RAY_ADDRESS`, or one on this machine.

    Bundle and users must be at the same paths on all machines. Each actor loads the bundle once
    and gets a share `gpus` of a GPU.
    """
    ray = import_ray()
    from ray.data import ActorPoolStrategy, DataContext

    ours = not ray.is_initialized()
    if ours:
        start_ray(ray)
    try:
        context = DataContext.get_current()
        context.enable_progress_bars = False  # the command shows its own
        context.print_on_execution_start = False
        numbers = [{"part": part} for part in parts]
        tables = ray.data.from_items(numbers, override_num_blocks=len(parts)).map_batches(
            _Actor,
            fn_constructor_args=(job,),
            batch_size=1,
            compute=ActorPoolStrategy(size=min(workers, len(parts))),
            num_cpus=1,
            num_gpus=gpus or None,
        )
        for row in tables.iter_rows():
            yield int(row["part"]), pa.ipc.open_stream(row["table"]).read_all()
    finally:
        if ours:
            ray.shutdown()


class _Actor:
    """A scorer for Ray Data, whose rows are whole parts."""

    def __init__(self, job: Job) -> None:
        from recsys.serving.batch.scoring import Scorer

        self._scorer = Scorer(job)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        parts = [int(part) for part in batch["part"]]
        return {"part": parts, "table": [_packed(self._scorer.part(part)) for part in parts]}


def _packed(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())
