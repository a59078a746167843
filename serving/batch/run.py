"""Run a job: score the missing parts, here or on Ray, and complete the output."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from recsys.artifacts import MANIFEST, read_manifest
from recsys.progress import say, track
from recsys.serving.batch.job import Job
from recsys.serving.batch.output import Output
from recsys.serving.cluster.ray import import_ray, start_ray
from recsys.serving.cluster.settings import Runner


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
    engine: Runner = Runner.local,
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
        if engine == Runner.ray:
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
    from recsys.serving.batch.scoring import Scorer

    ray = import_ray()
    from ray.util import ActorPool

    ours = not ray.is_initialized()
    if ours:
        start_ray(ray)
    try:
        # An actor that is lost is started again, with the part that it had.
        actor = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=-1, max_task_retries=-1)(Scorer)
        pool = ActorPool([actor.remote(job) for _ in range(min(workers, len(parts)))])
        yield from pool.map_unordered(lambda scorer, part: scorer.numbered.remote(part), parts)
    finally:
        if ours:
            ray.shutdown()
