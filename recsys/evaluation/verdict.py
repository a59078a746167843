"""The rule of the gate: when a challenger is offered. It imports no torch, for the settings.

A challenger has learned from newer events, so it is expected to be as good as the champion, and
what has to be shown is that it is worse.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PositiveInt

from recsys.config import internal, section

CHALLENGER, CHAMPION = "challenger", "champion"


@section
class GateConfig:
    """Section `gate`."""

    window: Annotated[float, Field(gt=0, lt=0.5)] = 0.3
    """Share of the new events, the newest ones, on which the two are compared; as many events
    before them are validation, and the challenger learns from the rest."""
    least_users: PositiveInt = 30
    """Users with an event in the window below which nothing is decided."""
    users: PositiveInt | None = internal(default=5000)
    """Largest number of next events that are asked for: users are sampled if there are more, and
    asked for later events as well if there are fewer; None takes all users."""
    k: PositiveInt = internal(default=10)
    """Length of the lists."""
    margin: Annotated[float, Field(ge=0)] = 0.1
    """Share of the champion's Recall@10, and of its figures of cold and of warm next items, that
    the challenger may surely lose, as long as it does not surely lose NDCG@10 of all."""
    coverage: Annotated[float, Field(ge=0)] = 0.8
    """Least share of the number of items that the champion's lists have together, or that the users
    took in the window, if these are fewer. The challenger is refused if its lists surely have
    fewer: the 95 % interval over users lies below."""
    resamples: PositiveInt = internal(default=1000)
    """Draws of the bootstrap."""


def decide(compared: dict[str, Any], config: GateConfig) -> list[str]:
    """Why a challenger is not offered, in sentences; empty if it is.

    Something must have been measured. The challenger must not be surely worse: the 95 % interval of
    the difference lies below 0 for NDCG of all users, or below the margin for recall and for a part
    of the users. Its lists must not surely have too few items.
    """
    k, reasons = config.k, []
    users = compared["window"]["users"]
    if users < config.least_users:
        reasons.append(
            f"Only {users} users have an event in the window; {config.least_users} are needed "
            "(gate.least_users). More new events decide it."
        )
    for row in compared["comparisons"]:
        about = f"{row['metric']}@{k} of {row['target']} next items"
        gap = f"{row['mean']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})"
        whole = row["target"] == "all" and row["metric"] == "ndcg"
        allowed = 0.0 if whole else -config.margin * row["b"]
        if whole and row["a"] == 0:
            reasons.append(
                f"Nothing was measured: no list of the challenger has the next item, {about} is "
                f"0.0000 against {row['b']:.4f} of the champion. More new events decide it."
            )
        elif row["high"] < allowed:
            least = "" if whole else f", and {allowed:+.4f} is allowed (gate.margin)"
            reasons.append(f"The challenger is worse: {about} {gap}{least}.")
    about = compared["coverage"]
    if about["gap"]["high"] < 0:
        mine, theirs, taken = (
            round(about[name] * about["items"]) for name in (CHALLENGER, CHAMPION, "taken")
        )
        least = config.coverage * min(theirs, taken)
        reasons.append(
            f"All lists together have {mine} of the {about['items']} items, those of the champion "
            f"{theirs}, and the users took {taken}; at least {least:.0f} are wanted "
            f"(gate.coverage), and the gap of {about['gap']['mean']:+.0f} items "
            f"({about['gap']['low']:+.0f} to {about['gap']['high']:+.0f}) is more than chance."
        )
    return reasons
