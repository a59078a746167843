"""Compare two rankers on the same users, paired by user: of one report, or of two.

The comparison reads rows as of `users.parquet`, without decoding. If the interval of a difference
excludes 0, the sampling of users alone does not explain it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys.artifacts import read_manifest
from recsys.errors import ArtifactError, DataError
from recsys.evaluation.metrics import paired_bootstrap

KIND, USERS = "evaluation", "users.parquet"
K = 10
Gains = dict[tuple[str, str], NDArray[np.float64]]
"""Targets and metric -> a number per user."""


def compare(a: Path | str, b: Path | str) -> dict[str, Any]:
    """Differences between the rankers under test of two reports, first minus second.

    They are about the first ten items and the next event, in every mode that both have; if users
    have several targets, also Recall of all targets.

    Returns:
        `a`, `b` (report and ranker), `users`, and `rows`: mode, targets (`next` or `all`), metric,
        both means, and `mean`, `low`, `high` of the difference.

    Raises:
        ArtifactError: not a report.
        DataError: different users, targets or splits, or lists shorter than ten.
    """
    reports = [_read(Path(path)) for path in (a, b)]
    (first, split), (second, other) = reports
    if split != other:
        raise DataError(f"{a} is of the {split} split, {b} of {other}: nothing to pair")
    names = [_ranker(table, path) for table, path in ((first, a), (second, b))]
    rows, users = [], 0
    for mode in sorted({*first["seen"].to_pylist()} & {*second["seen"].to_pylist()}):
        mine, theirs = _select(first, names[0], mode), _select(second, names[1], mode)
        for column, what in (("user_id", "users"), ("target_item_id", "targets")):
            if not mine[column].equals(theirs[column]):
                raise DataError(f"{a} and {b} have other {what}; evaluate both on the same data")
        users = len(mine)
        gaps = _differences(_gains(mine, K), _gains(theirs, K), resamples=1000)
        rows += [{"seen": mode, "k": K, **row} for row in gaps]
    if not rows:
        raise DataError(f"{a} and {b} have no mode in common: masked here, unmasked there")
    sides = [{"report": str(path), "ranker": n} for path, n in zip((a, b), names, strict=True)]
    return {"a": sides[0], "b": sides[1], "users": users, "rows": rows}


def compare_rankers(
    users: pa.Table, a: str, b: str, *, k: int = K, resamples: int = 1000
) -> list[dict[str, Any]]:
    """Differences between two rankers about the next event, first minus second.

    Args:
        users: rows as in `users.parquet`, of one mode.
        a: the first ranker.
        b: the second.
        k: length of the lists.
        resamples: draws of the bootstrap.

    Returns:
        Rows as of `compare`, with `target` (`all`, or users whose next item is `cold`: without
        training events, or `warm`), `users`, and `events`: a user who is asked for several events,
        in as many rows, counts once, with the mean. A target without users has no rows.
    """
    (mode,) = users["seen"].unique().to_pylist()
    mine, theirs = (_select(users, name, mode) for name in (a, b))
    cold = pc.equal(mine["target_popularity"], 0)
    parts = {"all": None, "cold": cold, "warm": pc.invert(cold)}
    rows = []
    for target, keep in parts.items():
        tables = [t if keep is None else t.filter(keep) for t in (mine, theirs)]
        if len(tables[0]):
            gains = [_of_users(_gains(table, k), table["user_id"]) for table in tables]
            gaps = _differences(*gains, resamples=resamples)
            count = pc.count_distinct(tables[0]["user_id"]).as_py()
            about = {"target": target, "users": count, "events": len(tables[0])}
            about |= {"seen": mode, "k": k}
            rows += [{**about, **row} for row in gaps if row["targets"] == "next"]
    return rows


def _differences(first: Gains, second: Gains, *, resamples: int) -> list[dict[str, Any]]:
    """Both means and their paired difference, by targets and metric."""
    rows = []
    for (targets, metric), left in first.items():
        right = second.get((targets, metric))
        if right is not None:
            gap = paired_bootstrap(left, right, resamples=resamples)
            means = {"a": float(left.mean()), "b": float(right.mean())}
            rows.append({"targets": targets, "metric": metric, **means, **vars(gap)})
    return rows


def _read(path: Path) -> tuple[pa.Table, str]:
    """The rows of users of a report, and its split."""
    manifest = read_manifest(path, KIND)
    try:
        table = pq.read_table(path / USERS)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: {error}; evaluate again") from error
    return table.sort_by("user_id"), str(manifest.config.get("split"))


def _ranker(table: pa.Table, path: Path | str) -> str:
    """The ranker under test of a report, whose lists are long enough."""
    ks = [int(c.removeprefix("hits_at_")) for c in table.column_names if c.startswith("hits_at_")]
    if max(ks) < K:
        raise DataError(f"{path} has lists of {max(ks)}, and {K} items are compared")
    names = table["ranker"].unique().to_pylist()
    return str(next(name for name in ("blended", "model", *names) if name in names))


def _select(table: pa.Table, ranker: str, mode: str) -> pa.Table:
    return table.filter(pc.and_(pc.equal(table["ranker"], ranker), pc.equal(table["seen"], mode)))


def _of_users(gains: Gains, user_ids: pa.ChunkedArray) -> Gains:
    """The mean of each user's rows, by first appearance, because draws are of whole users."""
    user = user_ids.combine_chunks().dictionary_encode().indices.to_numpy()
    rows = np.bincount(user)
    return {name: np.bincount(user, values) / rows for name, values in gains.items()}


def _gains(table: pa.Table, k: int) -> Gains:
    """Metric of each user's list, by targets and metric."""
    rank = table["rank"].fill_null(0).to_numpy()
    hit = (rank >= 1) & (rank <= k)
    gains = {
        ("next", "recall"): hit.astype(np.float64),
        ("next", "ndcg"): np.where(hit, 1 / np.log2(1 + np.maximum(rank, 1)), 0.0),
    }
    targets, hits = table["targets"].to_numpy(), f"hits_at_{k}"
    if (targets > 1).any() and hits in table.column_names:
        gains["all", "recall"] = table[hits].to_numpy() / targets
    return gains
