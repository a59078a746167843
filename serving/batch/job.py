"""Job: the users to score and everything that their answers depend on."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from recsys.artifacts import read_manifest
from recsys.config import explain
from recsys.errors import ConfigError
from recsys.serving.batch.users import Users
from recsys.serving.schemas.recommendations import RecommendationsRequest
from recsys.serving.settings import ServingSettings


@dataclass(frozen=True)
class Job:
    """A run over all users, as it is sent to the workers.

    Attributes:
        settings: bundle, data set of histories (None if `users` has them), device, data type, mode,
            CPU threads of one worker, and types of events that are not part of a history.
        users: parquet file or folder of users; None for every user of the data set.
        request: body of `POST /v1/recommendations` without user and history.
        part_rows: number of users in a part.
    """

    settings: ServingSettings
    users: Path | None
    request: dict[str, Any]
    part_rows: int = 1024

    def __getstate__(self) -> dict[str, Any]:
        """The fields without open files, for workers."""
        return {name: value for name, value in vars(self).items() if name != "source"}

    @cached_property
    def source(self) -> Users:
        """The users to score, with their histories."""
        return Users(self.users, self.settings.histories, self.settings.not_history)

    @cached_property
    def body(self) -> RecommendationsRequest:
        """The request for each user.

        Raises:
            ConfigError: the request is not valid, or has a field without a column in the output.
        """
        extra = [
            name
            for name in ("user", "history", "model", "include", "rules")
            if name in self.request
        ]
        if extra:
            raise ConfigError(f"--request: a batch does not support {extra[0]!r}; leave it out")
        try:
            return RecommendationsRequest.model_validate_json(
                json.dumps({**self.request, "history": []})
            )
        except ValidationError as error:
            raise ConfigError(explain(error, RecommendationsRequest, "--request")) from error

    @property
    def parts(self) -> int:
        """Number of parts of `part_rows` users; the last may have fewer."""
        return -(-len(self.source) // self.part_rows)

    def rows(self, part: int) -> tuple[int, int]:
        """First row of a part, and the row after its last."""
        start = part * self.part_rows
        return start, min(start + self.part_rows, len(self.source))

    @cached_property
    def plan(self) -> dict[str, Any]:
        """Everything that determines the answers: equal plans have equal answers."""
        return {
            "bundle": read_manifest(self.settings.bundle, "bundle").digest,
            "users": self.source.digest,
            "rows": len(self.source),
            "request": self.body.model_dump(
                mode="json", exclude={"user", "history", "include", "rules"}
            ),
            "part_rows": self.part_rows,
            **self.settings.model_dump(
                mode="json", include={"device", "dtype", "mode", "threads", "not_history"}
            ),
        }
