"""Output: a folder of parts, which becomes an artifact when all parts are written.

A part is written to a temporary file and renamed, so it is complete or absent, and a run after an
interruption continues with the missing parts. `plan.json` describes the parts; `manifest.json` is
written last.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recsys.artifacts import MANIFEST, Manifest, sha256
from recsys.errors import ArtifactError
from recsys.locks import locked
from recsys.serving.batch.job import Job
from recsys.serving.whole_files import UNFINISHED, replaced

KIND = "recommendations"
PLAN = "plan.json"
PARTS = "part-*.parquet"


class Output:
    """The output folder of a job; `opened` creates it."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self.job = folder, job

    @contextmanager
    def opened(self, *, force: bool = False) -> Iterator[list[int]]:
        """Lock the folder while the block runs; yields the missing parts.

        With `force`, the parts of another plan are deleted instead of refused.

        Raises:
            ArtifactError: the folder holds other files, or parts of another plan.
            LockedError: another run uses it.
        """
        with locked(self.folder, way_out="choose another folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._begin(force=force)
            yield [part for part in range(self.job.parts) if not self.path(part).is_file()]

    def path(self, part: int) -> Path:
        """Path of a part."""
        return self.folder / f"part-{part:06d}.parquet"

    def write(self, part: int, table: pa.Table) -> None:
        """Write a part atomically."""
        with replaced(self.path(part)) as path:
            pq.write_table(table, path, compression="zstd")

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

    def _write_json(self, name: str, values: dict[str, Any]) -> None:
        with replaced(self.folder / name) as path:
            text = json.dumps(values, indent=2, sort_keys=True)
            path.write_text(text + "\n", encoding="utf-8")
