"""Stage `retrieval`: fits neighbours, popularity and item vectors, and chooses how to blend them.

Everything is fitted on training events alone. The blend is then chosen on validation: a sample of
users is decoded once, as in serving. Among the settings of a small grid whose NDCG@10 is within
`slack` of the best, the one with the best recall of rare targets is chosen. If none is better than
the model alone, the blend is off.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys.config import as_dict
from recsys.dataset import Dataset, Examples
from recsys.errors import ConfigError
from recsys.listing import Union, candidate_rows, items_of_rows
from recsys.pipeline import Context
from recsys.progress import say, track
from recsys.retrieval import Blend, ItemItem, Retrieval, VectorIndex, decayed_counts, digest
from recsys.splits import TRAIN
from recsys.training import sasrec
from recsys.training.settings import RetrievalConfig
from recsys.training.target import TrainedTarget
from recsys.training.validation import TOP, discounted_gains

KIND = "retrieval"
BATCH = 64
RARE = 5  # a target with fewer training events is rare


def stage(context: Context) -> Path:
    """Write the `retrieval` artifact of a run with `Retrieval.save`.

    The manifest's `info` has Recall@10 and NDCG@10 on validation, of the model alone and blended.

    Raises:
        ConfigError: the semantic IDs need a SASRec model that these settings do not have.
        ArtifactError: the data set, the semantic IDs or the target are missing.
    """
    config = context.settings.section(KIND, RetrievalConfig)
    config = replace(config, users=context.sample(KIND, config.users))
    workspace = context.workspace
    parents = workspace.digests("dataset", "ids", "target")
    if (known := sasrec.trained(context)) is not None:
        parents[sasrec.KIND] = known[1]
    elif sasrec.KIND in workspace.manifest("ids").parents:
        raise ConfigError(
            "sasrec.epochs: 0, but this run's semantic IDs were learned from SASRec; use the "
            "configuration that they were made with (--config)"
        )
    output = context.output(KIND, as_dict(config), parents)
    if output.is_current():
        return output.path
    dataset = Dataset.load(workspace.dataset)
    start = time.perf_counter()
    content = sasrec.features(context, dataset) if config.vectors else None
    retrieval = fit(dataset, config, workspace.run("ids"), content)
    examples = dataset.examples("valid").sample(config.users)
    info: dict[str, Any] = {"fitted_on": "train"}
    if len(examples):
        trained = np.bincount(dataset.train_histories.items, minlength=len(dataset.item_ids))
        unions = _unions(retrieval, examples, config, TrainedTarget.load(workspace))
        blend, info["validation"] = _choose(
            retrieval, unions, examples.targets.items, trained, config
        )
        retrieval = replace(retrieval, blend=blend)
    info["seconds"] = round(time.perf_counter() - start, 1)
    with output.write(info) as folder:
        retrieval.save(folder)
    return output.path


def fit(
    dataset: Dataset,
    config: RetrievalConfig,
    ids: Path,
    content: NDArray[np.float32] | None = None,
) -> Retrieval:
    """Fit neighbours, popularity and vectors on the training events alone, without a blend.

    Args:
        dataset: canonical data.
        config: the settings.
        ids: the run's `ids` artifact, which may have features.
        content: (items, F) further features with the same weight, or None.
    """
    events, size = dataset.interactions, len(dataset.item_ids)
    trained = dataset.split == TRAIN
    item_item = ItemItem.directional(
        dataset.train_histories,
        size,
        window=config.window,
        reverse=config.reverse,
        source_damping=config.source_damping,
        target_damping=config.target_damping,
        decay=config.decay,
    )
    features, vectors = ids / "features.npy", None
    known = [np.load(features, allow_pickle=False)] if features.is_file() else []
    known += [] if content is None else [content]
    if config.vectors and known:
        parts = [VectorIndex.of(part).vectors for part in known]
        vectors = VectorIndex.of(np.concatenate(parts, axis=1))
        if config.near_share:
            item_item = item_item.with_near(vectors.neighbours(config.near), config.near_share)
    counts = decayed_counts(
        events.item[trained],
        size,
        timestamps=events.timestamp[trained] if events.has_time else None,
        half_life_days=config.half_life_days,
    )
    fitted_on = digest(dataset.train_histories)
    return Retrieval(item_item, counts, config.smoothing, vectors, fitted_on=fitted_on)


def _choose(
    retrieval: Retrieval,
    unions: list[tuple[NDArray[np.int64], Union]],
    targets: NDArray[np.int32],
    trained: NDArray[np.int64],
    config: RetrievalConfig,
) -> tuple[Blend, dict[str, Any]]:
    """Choose the best blend of the grid; also return its metrics and those of the model alone.

    Args:
        retrieval: is blended with the model.
        unions: candidates of the examples, in batches of rows.
        targets: (examples,) the target items.
        trained: (items,) training events of each item.
        config: the grid.
    """
    wanted = np.concatenate([targets[rows] for rows, _ in unions])
    rare = (trained[wanted] > 0) & (trained[wanted] < RARE)
    off = Blend(0.0, 1.0, 0.0, config.candidates, config.nodes)
    grid = product(config.weights, config.sharpness, config.nearness)
    tried = []
    for weight, sharpness, nearness in grid:
        if nearness and retrieval.vectors is None:
            continue
        blend = replace(off, weight=weight, sharpness=sharpness, nearness=nearness)
        items = np.concatenate([union.best(blend, TOP).items for _, union in unions])
        tried.append((_measure(items, wanted, rare), blend))
    plain = _measure(np.concatenate([u.items[:, :TOP] for _, u in unions]), wanted, rare)
    enough = (1 - config.slack) * max((found["ndcg@10"] for found, _ in tried), default=0.0)
    best, blend = max(
        (pair for pair in tried if pair[0]["ndcg@10"] >= enough),
        key=lambda pair: (pair[0]["rare_recall@10"] if config.slack else 0.0, pair[0]["ndcg@10"]),
        default=(plain, off),
    )
    if best["ndcg@10"] <= plain["ndcg@10"]:
        best, blend = plain, off
    say(
        f"blend: weight {blend.weight:g}, sharpness {blend.sharpness:g}, nearness "
        f"{blend.nearness:g}: validation NDCG@10 {best['ndcg@10']:.4f}, "
        f"the model alone {plain['ndcg@10']:.4f}"
    )
    return blend, {"users": len(wanted), "model": plain, "blended": best}


def _unions(
    retrieval: Retrieval, examples: Examples, config: RetrievalConfig, target: TrainedTarget
) -> list[tuple[NDArray[np.int64], Union]]:
    """Candidates of the model and of retrieval for each example without seen items, by batch."""
    from recsys.constraint import ItemTrie
    from recsys.decoding import SearchRequest, beam_search
    from recsys.models.tree_forward import TreeModel

    trie = ItemTrie.build(target.encoder.item_tokens)
    model = TreeModel.of(target.load_model())
    unions = []
    with track("blend", len(examples)) as bar:
        for start in range(0, len(examples), BATCH):
            rows = np.arange(start, min(start + BATCH, len(examples)))
            histories = examples.histories.take(rows)
            candidates = retrieval.candidates(histories, config.candidates)
            request = SearchRequest(
                target.encoder.encode_all(histories),
                exclude=[trie.excluded_rows(items) for items in histories],
                candidates=candidate_rows(trie, candidates),
                candidate_nodes=config.nodes,
            )
            beams = beam_search(model, request, trie, config.beams)
            found, scores = beams.rows.cpu().numpy(), beams.scores.cpu().numpy()
            own = items_of_rows(trie, found, scores, config.beams, excluded=histories)
            if beams.candidate_scores is not None:  # None without candidates
                union = Union.of(
                    own,
                    candidates,
                    beams.candidate_scores.cpu().numpy(),
                    retrieval,
                    histories,
                    trie=trie,
                )
                unions.append((rows, union))
            bar.advance(len(rows))
    return unions


def _measure(
    items: NDArray[np.int32], wanted: NDArray[np.int32], rare: NDArray[np.bool_]
) -> dict[str, float]:
    """Recall@10 and NDCG@10 of (n, <= 10) lists with one target each, and recall of rare ones."""
    hits = items == wanted[:, None]
    return {
        "recall@10": float(hits.any(1).mean()),
        "ndcg@10": float(discounted_gains(hits).mean()),
        "rare_recall@10": float(hits[rare].any(1).mean()) if rare.any() else 0.0,
    }
