"""Logs: one JSON object per line."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

_encode = json.JSONEncoder(default=str).encode
_request: ContextVar[str | None] = ContextVar("request", default=None)


@contextmanager
def of_request(request_id: str) -> Iterator[None]:
    """Add a request_id to the lines of the block, and of the tasks that it starts."""
    token = _request.set(request_id)
    try:
        yield
    finally:
        _request.reset(token)


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: time, level, logger, message, request, `fields` and exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a line."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **({} if (request_id := _request.get()) is None else {"request_id": request_id}),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return _encode(entry)


def configure(stream: TextIO) -> None:
    """Send the service's lines, and the server's warnings, to `stream`."""
    # Lines do not have them, and a record without them takes half of the time.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    for name, level in (("recsys", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
