"""Run a job: score the missing parts and complete the output."""

import time
from dataclasses import dataclass
from pathlib import Path

from recsys.artifacts import MANIFEST, read_manifest
from recsys.progress import say, track
from recsys.serving.batch import workers as engines
from recsys.serving.batch.job import Job
from recsys.serving.batch.output import Output
from recsys.serving.cluster.settings import Runner


@dataclass(frozen=True)
class Summary:
    """Summary of a run: what is in the output, and what this run scored.

    Attributes:
        seconds: duration, with the loading of the bundle.
        users_per_second: rate from the first part to the last, without the loading; None if the run
            wrote fewer than two parts.
    """

    out: str
    digest: str
    users: int
    parts: int
    scored: int
    seconds: float
    users_per_second: float | None


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
        RecsysError: a worker failed; complete parts are kept.
    """
    start = time.perf_counter()
    output = Output(out, job)
    with output.opened(force=force) as missing:
        total = len(job.source)
        rows = sum(stop - first for first, stop in map(job.rows, missing))
        if not missing and (out / MANIFEST).is_file():
            say(f"{out} is up to date.")
            digest = read_manifest(out).digest
            return Summary(str(out), digest, total, job.parts, 0, _since(start), None)
        if rows < total:
            say(f"{total - rows:,} of {total:,} users are done; continuing with the others.")
        if engine == Runner.ray:
            done = engines.on_ray(job, missing, workers, gpus)
        elif workers == 1:
            done = engines.in_this_process(job, missing)
        else:
            done = engines.on_processes(job, missing, workers)
        first = last = 0.0
        behind = 0
        with track("users", total) as bar:
            bar.advance(total - rows)
            for part, table in done if missing else ():
                output.write(part, table)
                bar.advance(len(table))
                last = time.perf_counter()
                if first:
                    behind += len(table)
                else:
                    first = last
        digest = output.finish().digest
        rate = behind / (last - first) if behind else None
        return Summary(str(out), digest, total, job.parts, rows, _since(start), rate)


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 3)
