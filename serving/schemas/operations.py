"""Wire format of the operations view."""

# Annotations stay live here: pydantic reads them.
from pydantic import BaseModel, ConfigDict, Field

from recsys.serving.schemas.models import ModelInfo


class Figures(BaseModel):
    """What happened in a stretch of time; None where nothing happened that it could be of."""

    qps: float = Field(description="Recommendations a second.")
    answers: int = Field(description="Recommendations.")
    p50_ms: float | None = Field(description="Median time to answer, at most a tenth too large.")
    p99_ms: float | None = Field(description="99th percentile of it.")
    errors: int = Field(description="Problems answered, of any kind.")
    batch_size: float | None = Field(description="Requests computed together, mean.")
    target_passes: float | None = Field(description="Passes of the target an answer, mean.")
    acceptance: float | None = Field(description="Share of the drafted levels accepted.")
    fallbacks: int = Field(description="Answers not of the model alone.")
    events: int = Field(description="Events stored.")
    shadow_overlap: float | None = Field(description="Items that answer and shadow share, mean.")
    shadow_accepted_levels: float | None = Field(description="Levels a shadow accepted, mean.")


class Series(BaseModel):
    """The fields of `Figures` as parallel lists, oldest first, the last slot still filling."""

    slot_seconds: float
    ago_seconds: list[float] = Field(description="How long before the last slot each began.")
    qps: list[float]
    answers: list[int]
    p50_ms: list[float | None]
    p99_ms: list[float | None]
    errors: list[int]
    batch_size: list[float | None]
    target_passes: list[float | None]
    acceptance: list[float | None]
    fallbacks: list[int]
    events: list[int]
    shadow_overlap: list[float | None]
    shadow_accepted_levels: list[float | None]


class Process(BaseModel):
    """The process behind the service; None where the system does not say."""

    uptime_s: float
    rss_bytes: int | None = Field(description="Memory that it occupies.")
    open_files: int | None
    threads: int


class Queue(BaseModel):
    """Requests that wait for the worker."""

    depth: int
    limit: int


class Stats(BaseModel):
    """The state of the service and its last ten minutes."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "phase": "ready",
                    "version": "0.1.0",
                    "models": [],
                    "aliases": {"champion": "demo"},
                    "queue": {"depth": 0, "limit": 256},
                    "process": {
                        "uptime_s": 3600.0,
                        "rss_bytes": 734003200,
                        "open_files": 24,
                        "threads": 14,
                    },
                    "last_minute": {
                        "qps": 12.5,
                        "answers": 750,
                        "p50_ms": 6.1,
                        "p99_ms": 19.0,
                        "errors": 0,
                        "batch_size": 1.4,
                        "target_passes": 3.0,
                        "acceptance": None,
                        "fallbacks": 2,
                        "events": 40,
                        "shadow_overlap": None,
                        "shadow_accepted_levels": None,
                    },
                    "series": {
                        "slot_seconds": 5.0,
                        "ago_seconds": [5.0, 0.0],
                        "qps": [12.5, 12.5],
                        "answers": [750, 750],
                        "p50_ms": [6.1, 6.1],
                        "p99_ms": [19.0, 19.0],
                        "errors": [0, 0],
                        "batch_size": [1.4, 1.4],
                        "target_passes": [3.0, 3.0],
                        "acceptance": [None, None],
                        "fallbacks": [2, 2],
                        "events": [40, 40],
                        "shadow_overlap": [None, None],
                        "shadow_accepted_levels": [None, None],
                    },
                }
            ]
        }
    )

    phase: str = Field(description="`starting`, `ready`, `failed` or `stopping`.")
    version: str = Field(description="Of the program.")
    models: list[ModelInfo]
    aliases: dict[str, str] = Field(description="Bundle that each alias stands for.")
    queue: Queue
    process: Process
    last_minute: Figures
    series: Series
