"""The rule of the gate: when a challenger is offered. It imports no torch, for the settings.

A challenger has learned from newer events, so it is expected to be as good as the champion, and
what has to be shown is that it is worse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recsys.config import check_bounds
from recsys.errors import ConfigError

CHALLENGER, CHAMPION = "challenger", "champion"


@dataclass(frozen=True)
class GateConfig:
    """Section `gate`.

    Attributes:
        window: share of the new events, the newest ones, on which the two are compared; as many
            events before them are validation, and the challenger learns from the rest.
        least_users: users with an event in the window below which nothing is decided.
        users: largest number of next events that are asked for: users are sampled if there are
            more, and asked for later events as well if there are fewer; None takes all users.
        k: length of the lists.
        margin: share of the champion's Recall@k, and of its figures of cold and of warm next items,
            that the challenger may surely lose, as long as it does not surely lose NDCG@k of all.
        coverage: least share of the number of items that the champion's lists have together, or
            that the users took in the window, if these are fewer. The challenger is refused if its
            lists surely have fewer: the 95 % interval over users lies below.
        latency: largest multiple of the champion's median latency.
        requests: requests that are timed, one after the other; 0 times none.
        resamples: draws of the bootstrap.
    """

    window: float = 0.3
    least_users: int = 30
    users: int | None = 5000
    k: int = 10
    margin: float = 0.1
    coverage: float = 0.8
    latency: float = 1.5
    requests: int = 100
    resamples: int = 1000

    def __post_init__(self) -> None:
        if not 0 < self.window < 0.5:
            raise ConfigError(f"window: expected 0 < window < 0.5, got {self.window}")
        least = {"least_users": 1, "k": 1, "margin": 0, "coverage": 0, "requests": 0}
        check_bounds(self, at_least=least, above_zero=["users", "latency", "resamples"])


def decide(found: dict[str, Any], config: GateConfig) -> list[str]:
    """Why a challenger is not offered, in sentences; empty if it is.

    Something must have been measured. The challenger must not be surely worse: the 95 % interval of
    the difference lies below 0 for NDCG of all users, or below the margin for recall and for a part
    of the users. Its lists must not surely have too few items, and it must keep the latency.
    """
    k, reasons = config.k, []
    users = found["window"]["users"]
    if users < config.least_users:
        reasons.append(
            f"Only {users} users have an event in the window; {config.least_users} are needed "
            "(gate.least_users). More new events decide it."
        )
    for row in found["comparisons"]:
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
    about = found["coverage"]
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
    times = [found["latency_ms"][name] for name in (CHALLENGER, CHAMPION)]
    if None not in times and times[0]["p50"] > config.latency * times[1]["p50"]:
        reasons.append(
            f"A request takes {times[0]['p50']:.1f} ms, and {times[1]['p50']:.1f} ms with the "
            "champion."
        )
    return reasons
