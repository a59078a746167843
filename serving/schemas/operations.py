"""The figures of the operations view on the wire."""

from pydantic import BaseModel, Field

from recsys.serving.schemas.common import Answer
from recsys.serving.schemas.models import ModelInfo


class Figures(BaseModel):
    """What happened in a period; null where there is nothing to take the mean of."""

    qps: float = Field(description="Recommendations per second.")
    answers: int = Field(description="Number of recommendations.")
    p50_ms: float | None = Field(description="Median latency, overestimated by at most 10 %.")
    p99_ms: float | None = Field(description="99th percentile of the latency.")
    errors: int = Field(description="Responses that were problems, of any kind.")
    batch_size: float | None = Field(description="Mean number of requests in a batch.")
    target_passes: float | None = Field(description="Mean number of target passes per answer.")
    acceptance: float | None = Field(description="Share of drafted levels that were accepted.")
    fallbacks: int = Field(description="Answers that retrieval or popularity filled up.")
    events: int = Field(description="Number of stored events.")
    shadow_overlap: float | None = Field(
        description="Mean share of items common to answer and shadow."
    )
    shadow_accepted_levels: float | None = Field(description="Mean accepted levels of a shadow.")


class Series(BaseModel):
    """The fields of `Figures` as parallel lists, oldest first, the last slot still filling."""

    slot_seconds: float
    ago_seconds: list[float] = Field(description="Age of each slot relative to the last.")
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
    """The process of the service; null where the system does not report a value."""

    uptime_s: float
    rss_bytes: int | None = Field(description="Resident memory.")
    open_files: int | None
    threads: int


class Queue(BaseModel):
    """Requests that wait for the model."""

    depth: int
    limit: int


class Stats(Answer):
    """The state of the service and its last ten minutes."""

    phase: str = Field(
        description="`starting`, `ready`, `failed` or `stopping`.", examples=["ready"]
    )
    version: str = Field(description="Version of recsys.", examples=["0.1.0"])
    models: list[ModelInfo]
    aliases: dict[str, str] = Field(
        description="Bundle that each alias stands for.", examples=[{"champion": "demo"}]
    )
    queue: Queue
    process: Process
    last_minute: Figures
    series: Series
