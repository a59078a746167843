"""Run: a job, from its first missing part to the sealed folder."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from recsys.artifacts import MANIFEST, read_manifest
from recsys.progress import say, track
from recsys.serving.batch import workers as engines
from recsys.serving.batch.job import Job
from recsys.serving.batch.output import Output

EngineName = Literal["local", "ray"]


@dataclass(frozen=True)
class Summary:
    """What a run did.

    Attributes:
        out: the folder.
        digest: of the sealed folder.
        users: rows in it.
        parts: files that they are in.
        scored: users scored by this run; the others were there.
        seconds: that it took, with the loading of the bundle.
        users_per_second: from the first part to the last of this run, so without the loading;
            None for fewer than two.
    """

    out: str
    digest: str
    users: int
    parts: int
    scored: int
    seconds: float
    users_per_second: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def score(
    job: Job,
    out: Path,
    *,
    engine: EngineName = "local",
    workers: int = 1,
    gpus: float = 0.0,
    force: bool = False,
) -> Summary:
    """Score all users of a job, but for the parts that are there.

    Args:
        job: what to score.
        out: folder to write.
        engine: processes of this machine, or actors of a Ray cluster.
        workers: processes or actors.
        gpus: share of a GPU that each actor takes.
        force: drop what another plan left in `out`.

    Raises:
        ArtifactError: the bundle is damaged; `out` is in use, or holds something else.
        DataError: the users' file is malformed.
        ConfigError: the request is none, or Ray is not installed.
        RecsysError: a worker failed; what is done is kept.
    """
    start = time.perf_counter()
    output = Output(out, job)
    with output.opened(force=force) as missing:
        total = len(job.source)
        wanted = sum(stop - first for first, stop in map(job.rows, missing))
        if not missing and (out / MANIFEST).is_file():
            say(f"{out} is up to date.")
            digest = read_manifest(out).digest
            return Summary(str(out), digest, total, job.parts, 0, _since(start), None)
        if wanted < total:
            say(f"{total - wanted:,} of {total:,} users are there; going on with the others.")
        if engine == "ray":
            done = engines.on_ray(job, missing, workers, gpus)
        elif workers == 1:
            done = engines.in_this_process(job, missing)
        else:
            done = engines.on_processes(job, missing, workers)
        first = last = 0.0
        behind = 0
        with track("users", total) as bar:
            bar.advance(total - wanted)
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
        return Summary(str(out), digest, total, job.parts, wanted, _since(start), rate)


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 3)
