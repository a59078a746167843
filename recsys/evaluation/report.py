"""Report: a result as one JSON document, as tables on a terminal, and as one HTML page.

Tables and page are made from the document alone. Metrics are computed in `protocol`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.box import SIMPLE_HEAD
from rich.table import Table

from recsys.config import as_dict
from recsys.dataset import Dataset
from recsys.evaluation.compare import USERS
from recsys.evaluation.protocol import COLD, Result, find

SCHEMA = 1
JSON, HTML = "report.json", "report.html"
TEMPLATE, STYLE = "report.html.jinja", "page.css"
SHOWN_HISTORY = 8  # events of an example user
SIMPLE = ("popularity", "item-kNN")
"""Baselines that a recommender should exceed where little is known."""
NAMES = {"recall": "Recall", "ndcg": "NDCG", "mrr": "MRR"}


def document(
    result: Result,
    dataset: Dataset,
    *,
    name: str,
    made_from: Mapping[str, str],
    semantic_ids: Mapping[str, Any] | None = None,
    warnings: Sequence[str] = (),
    weaknesses: Sequence[str] = (),
    served_has_seen_all: bool = False,
) -> dict[str, Any]:
    """The result as plain JSON values, with stable keys and columns.

    Args:
        result: result of the evaluation.
        dataset: data of the evaluation, for titles and item ids.
        name: name of the model under test.
        made_from: name -> digest of bundle and data set.
        semantic_ids: statistics of the catalog's semantic IDs, if it has any.
        warnings: reasons to doubt the figures.
        weaknesses: what is worse than a simpler ranker, in words.
        served_has_seen_all: whether what is served has seen all events, unlike what is evaluated.
    """
    config = result.config
    return {
        "schema": SCHEMA,
        "name": name,
        "split": config.split,
        "made_from": dict(made_from),
        "warnings": list(warnings),
        "weaknesses": list(weaknesses),
        "served_has_seen_all": served_has_seen_all,
        "protocol": as_dict(config),
        "headline": {
            "seen": config.seen_modes[0],
            "targets": config.targets,
            "k": config.headline_k,
        },
        "data": result.facts,
        "rankers": list(result.rankings),
        "metrics": result.metrics,
        "comparisons": result.comparisons,
        "coverage": result.coverage,
        "segments": result.segments,
        "semantic_ids": dict(semantic_ids) if semantic_ids is not None else None,
        "examples": _examples(result, dataset),
    }


def write(folder: Path, document: dict[str, Any], users: pa.Table) -> None:
    """Write the document, its page, and the rows of users into a folder."""
    text = json.dumps(document, indent=1, ensure_ascii=False)
    (folder / JSON).write_text(text + "\n", encoding="utf-8")
    (folder / HTML).write_text(render(document), encoding="utf-8")
    pq.write_table(users, folder / USERS)


def read(folder: Path) -> dict[str, Any]:
    """The document of a report."""
    document: dict[str, Any] = json.loads((folder / JSON).read_text(encoding="utf-8"))
    return document


def per_user(result: Result, dataset: Dataset) -> pa.Table:
    """One row per user, ranker and mode.

    Columns: `user_id`, `ranker`, `seen`, `history_length`, `target_item_id` (next target),
    `target_popularity` (its training events), `rank` (of the next target, from 1; null beyond
    max(ks)), `targets` (number of distinct targets of the split), and `hits_at_K` (number of them
    among the first K).
    """
    next_items = result.targets["next"].items
    shared = {
        "user_id": pa.array(dataset.interactions.user_ids[result.users]),
        "history_length": pa.array(result.histories.lengths.astype(np.int32)),
        "target_item_id": pa.array(dataset.item_ids[next_items]),
        "target_popularity": pa.array(result.popularity[next_items].astype(np.int32)),
        "targets": pa.array(result.targets["all"].lengths.astype(np.int32)),
    }
    tables = []
    for ranker, modes in result.rankings.items():
        for mode, ranking in modes.items():
            is_next = ranking.hits["next"].is_hit
            rank = pa.array(is_next.argmax(axis=1).astype(np.int32) + 1, mask=~is_next.any(axis=1))
            hits = np.cumsum(ranking.hits["all"].is_hit, axis=1, dtype=np.int32)
            labels = {
                key: pa.array([value] * len(is_next)).dictionary_encode()
                for key, value in (("ranker", ranker), ("seen", mode))
            }
            counts = {f"hits_at_{k}": pa.array(hits[:, k - 1]) for k in result.config.ks}
            tables.append(pa.table({**labels, **shared, "rank": rank, **counts}))
    return pa.concat_tables(tables).unify_dictionaries()


def tables(document: dict[str, Any]) -> list[Table]:
    """Tables for a terminal: one for each kind of targets and each mode."""
    shown = []
    for kind in _kinds(document):
        for mode in _modes(document):
            event = "next event" if kind == "next" else "all events of the split"
            table = Table(
                box=SIMPLE_HEAD,  # narrow enough for 80 columns
                pad_edge=False,
                collapse_padding=True,
                title=f"{document['name']}: [bold]{document['split'].upper()}[/bold] split, "
                f"{document['data']['users_evaluated']:,} users,\n{event}, seen items {mode}",
                caption="mean, and below it the 95 % interval over users",
            )
            table.add_column("", no_wrap=True)
            ks, last = document["protocol"]["ks"], document["headline"]["k"]
            near = ks[max(ks.index(last) - 1, 0) : ks.index(last) + 1]  # with the K before it
            columns = [(metric, k) for metric in ("recall", "ndcg") for k in near] + [("mrr", last)]
            for metric, k in columns:
                table.add_column(f"{NAMES[metric]}@{k}", justify="right")
            table.add_column(f"cover@{last}", justify="right")
            for i, ranker in enumerate(document["rankers"]):
                cells = []
                for metric, k in columns:
                    about = {"seen": mode, "targets": kind, "metric": metric, "k": k}
                    row = find(document["metrics"], ranker=ranker, **about)
                    low, high = (f"{row[key]:.3f}".lstrip("0") for key in ("low", "high"))
                    cells.append(f"{row['mean']:.4f}\n[dim]{low}–{high}[/dim]")
                row = find(document["coverage"], ranker=ranker, seen=mode, k=last)
                cells.append(f"{row['coverage']:.1%}")
                table.add_row(ranker, *cells, style="bold" if i == 0 else "")
            shown.append(table)
    return shown


def cold_rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Recall at the headline K within the `COLD` groups: one row for each group with users.

    A row has `group`, `users`, and `rankers`: name -> the segment's row.
    """
    conditions = {"metric": "recall", "k": document["headline"]["k"]}
    conditions["seen"] = document["headline"]["seen"]
    rows = []
    for group, (by, segment) in COLD.items():
        about = {**conditions, "by": by, "segment": segment}
        rows_by = {
            row["ranker"]: row
            for row in document["segments"]
            if all(row[key] == value for key, value in about.items())
        }
        if rows_by:
            users = next(iter(rows_by.values()))["users"]
            rows.append({"group": group, "users": users, "rankers": rows_by})
    return rows


def headline(document: dict[str, Any]) -> list[str]:
    """The report in a few sentences: the main figure and the comparisons."""
    about = {"metric": "recall", **document["headline"]}
    k, model = about["k"], document["rankers"][0]
    row = find(document["metrics"], ranker=model, **about)
    sentence = f"hold the next event {row['mean']:.1%} of the time"
    if about["targets"] == "all":
        sentence = f"hold {row['mean']:.1%} of the items that a user has in the split"
    sentences = [
        f"Recall@{k} {row['mean']:.4f}: the first {k} {sentence} "
        f"(95 % interval {row['low']:.1%} to {row['high']:.1%}), seen items {about['seen']}."
    ]
    if document["data"]["baskets"]:
        sentences.append(
            "Many events of a user have one time, as lines of an order, so which of them comes "
            "next is an accident of the file: figures of all events of the split count."
        )
    shown = {
        row["ranker"]
        for row in document["coverage"]
        if row["seen"] == about["seen"] and row["coverage"]
    }
    for ranker in document["rankers"][1:]:
        if ranker not in shown:
            continue  # it listed nothing, as repeats do without seen items
        gap = find(document["comparisons"], ranker=model, against=ranker, **about)
        verdict = "above" if gap["low"] > 0 else "below" if gap["high"] < 0 else "level with"
        sentences.append(
            f"{verdict.capitalize()} {ranker}: {gap['mean']:+.4f} "
            f"({gap['low']:+.4f} to {gap['high']:+.4f})."
        )
    if document.get("served_has_seen_all"):  # not in reports of former versions
        sentences.append(
            "Figures are of what was evaluated; what is served has seen the events of validation "
            "and test as well."
        )
    if away := document["data"]["unavailable"]:
        sentences.append(_of_availability(away, document["data"]["users_in_split"]))
    return sentences


def _of_availability(away: dict[str, int], users: int) -> str:
    """What the figures do with items that were unavailable at the time of the report."""
    hidden = (
        f"{away['items']:,} items were not available when this report was made, so no list has one."
    )
    if not away["users"]:
        return hidden
    if away["users"] == users:
        return f"{hidden} The next event of every user is on such an item, so every list misses it."
    return (
        f"{hidden} {away['users']:,} of {users:,} users are left out, because their next event is "
        "on such an item."
    )


def render(document: dict[str, Any]) -> str:
    """The document as one self-contained HTML page without scripts."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = lambda value: f"{value:.4f}"
    environment.filters["signed"] = lambda value: f"{value:+.4f}".replace("-", "−")
    environment.filters["percent"] = lambda value: f"{value:.1%}".replace("%", " %")
    environment.filters["count"] = lambda value: f"{value:,}"
    folder = files("recsys.evaluation")
    template = folder.joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(template).render(
        report=document,
        style=Markup(folder.joinpath(STYLE).read_text(encoding="utf-8")),  # noqa: S704 - our own
        headline=headline(document),
        names=NAMES,
        kinds=_kinds(document),
        modes=_modes(document),
        find=find,
        cold=cold_rows(document),
    )


def _kinds(document: dict[str, Any]) -> list[str]:
    """Kinds of targets to show: `all` is omitted if each user has one target."""
    counts = document["data"]["targets"]
    first = document["headline"]["targets"]
    other = {"next": "all", "all": "next"}[first]
    return [first] if counts["next"] == counts["all"] else [first, other]


def _modes(document: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["seen"] for row in document["coverage"]))


def _examples(result: Result, dataset: Dataset) -> list[dict[str, Any]]:
    """Random users, half of them with a hit."""
    config = result.config
    k, mode = config.headline_k, config.seen_modes[0]
    model = next(iter(result.rankings))
    is_target = result.rankings[model][mode].hits["all"].is_hit[:, :k]
    rng = np.random.default_rng(config.seed)
    has_hit = is_target.any(axis=1)
    hit, miss = (rng.permutation(np.flatnonzero(side)) for side in (has_hit, ~has_hit))
    hits = min(len(hit), max(config.examples // 2, config.examples - len(miss)))
    chosen = [*hit[:hits], *miss[: config.examples - hits]]
    titles = dataset.items["title"].to_pylist()

    def item(index: int) -> dict[str, str]:
        item_id = str(dataset.item_ids[index])
        return {"item_id": item_id, "title": titles[index] or item_id}

    examples = []
    for row in chosen:
        listed = result.rankings[model][mode].items[row, :k]
        ranks: dict[str, int | None] = {}
        for ranker, modes in result.rankings.items():
            positions = np.flatnonzero(modes[mode].hits["next"].is_hit[row])
            ranks[ranker] = int(positions[0]) + 1 if len(positions) else None
        examples.append(
            {
                "user_id": str(dataset.interactions.user_ids[result.users[row]]),
                "history_length": int(result.histories.lengths[row]),
                "history": [item(i) for i in result.histories[int(row)][-SHOWN_HISTORY:]],
                "targets": [item(i) for i in result.targets["all"][int(row)]],
                "list": [
                    {**item(i), "hit": bool(is_hit)}
                    for i, is_hit in zip(listed, is_target[row], strict=True)
                    if i >= 0
                ],
                "ranks": ranks,
            }
        )
    return examples
