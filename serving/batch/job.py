"""Job: what is to be scored, and how; everything that an answer depends on, and nothing else."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from recsys.artifacts import read_manifest
from recsys.errors import ConfigError
from recsys.serving.batch.users import Users, open_users
from recsys.serving.schemas.recommendations import RecommendationsRequest


@dataclass(frozen=True)
class Job:
    """One run over all users. Workers get it as it is.

    Attributes:
        bundle: to answer with.
        users: parquet of users; None for all of `histories`.
        histories: canonical data set; None where `users` has the histories.
        request: what each is asked, as the body of `POST /v1/recommendations` without user and
            history.
        part_rows: users in a part.
        device: where the models run.
        dtype: their arithmetic.
        mode: how they decode (`recsys.recommender.Recommender.load`).
        threads: CPU threads of one worker.
    """

    bundle: Path
    users: Path | None
    histories: Path | None
    request: dict[str, Any]
    part_rows: int = 1024
    device: str = "cpu"
    dtype: str = "float32"
    mode: Literal["auto", "beam", "exhaustive", "draft", "planned"] = "auto"
    threads: int = 1

    def __getstate__(self) -> dict[str, Any]:
        """For workers: all but the open files."""
        return {name: value for name, value in vars(self).items() if name != "source"}

    @cached_property
    def source(self) -> Users:
        """The users.

        Raises:
            ArtifactError, DataError: there are none, or they are malformed.
        """
        return open_users(self.users, self.histories)

    @cached_property
    def body(self) -> RecommendationsRequest:
        """What each user is asked.

        Raises:
            ConfigError: it is no request of the service, or asks for what a table has no place for.
        """
        extra = [name for name in ("user", "history", "model", "include") if name in self.request]
        if extra:
            raise ConfigError(f"--request: {extra[0]!r} has no place in a batch; leave it out")
        try:
            return RecommendationsRequest.model_validate_json(
                json.dumps({**self.request, "history": []})
            )
        except ValidationError as error:
            found = error.errors()[0]
            place = ".".join(str(part) for part in found["loc"]) or "request"
            raise ConfigError(f"--request: {place}: {found['msg']}") from error

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return -(-len(self.source) // self.part_rows)

    def rows(self, part: int) -> tuple[int, int]:
        """First row of a part, and the row behind its last."""
        start = part * self.part_rows
        return start, min(start + self.part_rows, len(self.source))

    @cached_property
    def plan(self) -> dict[str, Any]:
        """What decides the answers, by content: equal plans have equal answers."""
        return {
            "bundle": read_manifest(self.bundle, "bundle").digest,
            "users": self.source.digest,
            "rows": len(self.source),
            "request": self.body.model_dump(mode="json", exclude={"user", "history", "include"}),
            "part_rows": self.part_rows,
            "device": self.device,
            "dtype": self.dtype,
            "mode": self.mode,
            "threads": self.threads,
        }

    @property
    def digest(self) -> str:
        """Identity of the plan."""
        text = json.dumps(self.plan, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
