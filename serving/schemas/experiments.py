"""Experiments on the wire."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, StringConstraints, model_validator

from recsys.serving.schemas.common import NAME, AliasName, Body
from recsys.serving.schemas.events import EventType

MAX_ARMS = 5
MIN_SHARE = 0.01  # the interval is as wide as the smallest share is small
ExperimentName = Annotated[
    str,
    StringConstraints(pattern=NAME),
    Field(examples=["homepage"]),
]


class Arm(Body):
    """An alias and its share of the users, relative to the weights of the other arms."""

    alias: AliasName = Field(examples=["champion"])
    weight: float = Field(gt=0, le=1_000, examples=[1.0])


class ExperimentBody(Body):
    """An experiment: weighted arms, the event that counts, the window."""

    arms: list[Arm] = Field(
        min_length=2,
        max_length=MAX_ARMS,
        description="The first arm is the one that the others are compared with.",
        examples=[[{"alias": "champion", "weight": 1.0}, {"alias": "challenger", "weight": 1.0}]],
    )
    event: EventType = Field(
        "click",
        description="An answer is followed if its user sends an event of this type with its "
        "`recommendation_id` within the window.",
        examples=["click"],
    )
    window_s: int = Field(
        86_400,
        ge=60,
        le=2_592_000,
        description="Seconds after an answer within which the event counts. The answers to a user "
        "count for as long after the first.",
    )
    days: int = Field(
        28,
        ge=1,
        le=90,
        description="How long it runs; after that, all users get the first arm.",
    )

    @model_validator(mode="after")
    def _check_arms(self) -> Self:
        names = [arm.alias for arm in self.arms]
        if len(set(names)) < len(names):
            raise ValueError("'arms' must have different aliases; two may have the same bundle")
        if min(self.shares) < MIN_SHARE:
            raise ValueError(f"each arm needs at least {MIN_SHARE:.0%} of the users")
        return self

    @property
    def shares(self) -> list[float]:
        """The share of the users of each arm."""
        total = sum(arm.weight for arm in self.arms)
        return [arm.weight / total for arm in self.arms]


class ArmInfo(BaseModel):
    """An arm of an experiment."""

    alias: str
    share: float = Field(description="Its share of the users.")


class ExperimentInfo(BaseModel):
    """An experiment and its arms."""

    name: str
    arms: list[ArmInfo]
    event: str
    window_s: int
    status: Literal["running", "ended"]
    started_ms: int = Field(description="Unix milliseconds.")
    ends_ms: int
    by: str | None = Field(description="Name of the key that put it; null without keys.")


class ArmResults(BaseModel):
    """What an arm achieved, over users whose time in the experiment is over."""

    alias: str
    observed: int = Field(description="Number of users whose answers have all had their window.")
    waiting: int = Field(description="Number of users who have not.")
    exposures: int = Field(description="Answers to `observed` users that count.")
    followed: int = Field(description="Those that led to an event.")
    rate: float | None = Field(
        description="Mean over `observed` users of the share of their answers that were followed."
    )
    difference: float | None = Field(
        None,
        description="Estimated rate minus that of the first arm; null without `observed` users.",
    )
    low: float | None = Field(None, description="Lower end of its interval.")
    high: float | None = Field(None, description="Upper end of its interval.")
    verdict: Literal["first", "no_users", "undecided", "better", "worse"] = Field(
        description="`better` or `worse` than the first arm if the interval excludes 0."
    )


class ExperimentResults(BaseModel):
    """The arms of an experiment, compared with the first one."""

    name: str
    level: float = Field(
        description="Probability that all intervals cover the true differences at all times."
    )
    arms: list[ArmResults]
    ratio_p_value: float = Field(
        description="How well the numbers of users fit the shares, valid at any time; below 0.001 "
        "something loses or adds users of an arm."
    )
    verdict: str = Field(description="The result in words.")


class ExperimentRef(BaseModel):
    """The experiment and the arm that a request fell into."""

    name: str
    arm: str = Field(description="The alias that answered.")
