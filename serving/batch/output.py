"""Output: a folder of parts, which becomes an artifact when all parts are written.

A part is written to a temporary file and renamed, so it is complete or absent, and a run after an
interruption continues with the missing parts. `plan.json` describes the parts; `manifest.json` is
written last.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recsys.artifacts import MANIFEST, Manifest, sha256
from recsys.errors import ArtifactError
from recsys.serving.batch.job import Job

KIND = "recommendations"
PLAN = "plan.json"
PARTS = "part-*.parquet"
UNFINISHED = ".writing"
PLAN_KEY = b"recsys.plan"


class Output:
    """The output folder of a job; `opened` creates it."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self.job = folder, job

    @contextmanager
    def opened(self, *, force: bool = False) -> Iterator[list[int]]:
        """Lock the folder while the block runs; yields the missing parts.

        With `force`, the parts of another plan are deleted instead of refused.

        Raises:
            ArtifactError: another run uses the folder, or it holds other files or parts of another
                plan.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends
            except BlockingIOError as error:
                raise ArtifactError(f"{self.folder}: another run uses this folder") from error
            self._begin(force=force)
            yield [part for part in range(self.job.parts) if not self._is_there(part)]
        finally:
            os.close(handle)

    def path(self, part: int) -> Path:
        """Path of a part."""
        return self.folder / f"part-{part:06d}.parquet"

    def write(self, part: int, table: pa.Table) -> None:
        """Write a part atomically."""
        marked = table.replace_schema_metadata({PLAN_KEY: self.job.digest.encode()})
        with self._whole(self.path(part)) as path:
            pq.write_table(marked, path, compression="zstd")

    def finish(self) -> Manifest:
        """Write the manifest, after all parts."""
        files = sorted([*self.folder.glob(PARTS), self.folder / PLAN])
        plan = self.job.plan
        manifest = Manifest(
            KIND,
            {name: value for name, value in plan.items() if name not in ("bundle", "users")},
            {"bundle": plan["bundle"], "users": plan["users"]},
            {file.name: sha256(file) for file in files},
        )
        self._write_json(MANIFEST, manifest.__dict__)
        return manifest

    def _begin(self, *, force: bool) -> None:
        for leftover in self.folder.glob(f".*{UNFINISHED}"):
            leftover.unlink()
        plan = self.folder / PLAN
        if plan.is_file():
            before = json.loads(plan.read_text(encoding="utf-8"))
            other = [key for key, value in self.job.plan.items() if before.get(key) != value]
            if not other and set(before) == set(self.job.plan):
                return
            if not force:
                raise ArtifactError(
                    f"{self.folder} holds answers made with another {', '.join(other) or 'plan'}; "
                    "choose another folder, or delete them with --force"
                )
            (self.folder / MANIFEST).unlink(missing_ok=True)
            for part in self.folder.glob(PARTS):
                part.unlink()
        elif any(self.folder.iterdir()):
            raise ArtifactError(
                f"{self.folder} is not empty and holds no batch; choose another folder"
            )
        self._write_json(PLAN, self.job.plan)

    def _is_there(self, part: int) -> bool:
        file = self.path(part)
        if not file.is_file():
            return False
        try:
            metadata = pq.read_metadata(file)
        except (OSError, pa.ArrowInvalid):
            return False  # damaged: it is written again
        start, stop = self.job.rows(part)
        marked = (metadata.metadata or {}).get(PLAN_KEY) == self.job.digest.encode()
        return marked and metadata.num_rows == stop - start

    def _write_json(self, name: str, values: dict[str, Any]) -> None:
        with self._whole(self.folder / name) as path:
            text = json.dumps(values, indent=2, sort_keys=True)
            path.write_text(text + "\n", encoding="utf-8")

    @contextmanager
    def _whole(self, final: Path) -> Iterator[Path]:
        """A temporary path, which is synced and renamed to `final` after the block."""
        path = final.with_name(f".{final.name}{UNFINISHED}")
        yield path
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
        path.replace(final)
