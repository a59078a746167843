"""Stage `retrieval`: fits neighbours, popularity and item vectors, and the reranker.

Everything but the reranker is counted on training events alone; the rules of counting pairs are
chosen on validation users (`recsys.retrieval.pair_search`). The reranker is then fitted on these
users, who are decoded once, as in serving: without items that are unavailable now. Users whose next
item is one of these are left out. Where a part of the reranker ranks better alone, that
part is served (`recsys.training.reranking`). What is served has counted all events, those of
validation and test too; what was counted of training events is kept beside it for the evaluation.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from recsys.artifacts import Workspace
from recsys.availability import available_items
from recsys.bundle import ITEM_ENCODER
from recsys.config import as_dict
from recsys.dataset import Dataset, Examples
from recsys.errors import ConfigError
from recsys.evaluation.baselines import (
    PAIR_RULES,
    POPULARITY,
    RECENT,
    fit_baselines,
    of_available,
)
from recsys.evaluation.protocol import Ranker
from recsys.listing import items_of_rows
from recsys.live import build_trie
from recsys.pipeline import Context
from recsys.progress import console, say
from recsys.retrieval import (
    ItemItem,
    PairRules,
    Pool,
    Reranker,
    Retrieval,
    VectorIndex,
    decayed_counts,
    digest,
    search_rules,
)
from recsys.retrieval.again import Repeats, that_count
from recsys.retrieval.as_new import AsNew
from recsys.retrieval.content import ContentIndex
from recsys.retrieval.event_types import EventTypes
from recsys.retrieval.evidence import Evidence
from recsys.retrieval.popularity import DAY, RECENT_SHARE
from recsys.retrieval.reranker import AGAIN, LEAST_USERS, MODEL, NEW
from recsys.retrieval.retrieval import FORMAT
from recsys.retrieval.rows import blocked_items
from recsys.semantic_ids.encoder import PLACED
from recsys.semantic_ids.words import unit_rows
from recsys.splits import TRAIN
from recsys.training import sasrec
from recsys.training.reranking import (
    MISSED,
    RERANKER,
    Candidates,
    choose,
    fit_again,
    fit_new,
    gains,
)
from recsys.training.settings import RetrievalConfig
from recsys.training.soft_labels import parts_until
from recsys.training.target import TrainedTarget
from recsys.training.validation import TOP

KIND = "retrieval"
BATCH = 64
LEAST_DECODED = 128  # validation users who are decoded even if the time is spent
BY_COUNTS = POPULARITY, RECENT  # the latter is a source if it ranks better
# The parts of the stage's time by whose ends these are done.
RULES, DECODED, CHOSEN, FITTED_AGAIN, FITTED_TO_NEW = 0.2, 0.4, 0.6, 0.75, 0.95
SHARE_NEW = 0.2  # of the items, treated as new to fit the weights for such items
USERS_ADDED = 3000  # validation users, at most, for the weights of new items and of buying again


def stage(context: Context) -> Path:
    """Write the `retrieval` artifact of a run with `Retrieval.save`.

    The manifest's `info` has Recall@10 and NDCG@10 on validation, of what is served and of each
    part.

    Raises:
        ConfigError: the semantic IDs need a SASRec model that these settings do not have.
        ArtifactError: the data set, the semantic IDs or the target are missing.
    """
    config = context.settings.section(KIND, RetrievalConfig)
    config = replace(config, users=context.sample(KIND, config.users))
    workspace = context.workspace
    begun, end = time.monotonic(), context.deadline(KIND)

    def by(part: float) -> float:
        return end if math.isinf(end) else begun + part * (end - begun)

    parents = workspace.digests("dataset", "ids", "target")
    if (known := sasrec.trained(context)) is not None:
        parents[sasrec.KIND] = known[1]
    elif sasrec.KIND in workspace.manifest("ids").parents:
        raise ConfigError(
            "sasrec.epochs: 0, but this run's semantic IDs were learned from SASRec; use the "
            "configuration that they were made with (--config)"
        )
    output = context.output(KIND, as_dict(config) | {"format": FORMAT}, parents)
    if output.is_current():
        return output.path
    dataset = Dataset.load(workspace.dataset)
    start = time.perf_counter()
    examples = dataset.validation()
    size = len(dataset.item_ids)
    rules = search_rules(dataset.train_histories, size, examples, by(RULES))
    retrieval, served = fit(dataset, rules, workspace.run("ids"), sasrec.features(context, dataset))
    available = available_items(dataset.items, int(time.time()))
    if available is not None and not available.any():
        say(
            "retrieval: no item is available now, by the items' columns available, available_from "
            "and available_until, so that nothing could be recommended. The reranker is fitted as "
            "if all were. Data prepared with --set data.columns.available_until=none, for example, "
            "ignore a column"
        )
        available = None
    examples = examples.servable(available).sample(config.users)
    info: dict[str, Any] = {"fitted_on": "train", "pair_rules": asdict(rules)}
    if len(examples):
        if known is not None:
            retrieval = replace(retrieval, sasrec=known[0])
        parts = fit_baselines(dataset.train_histories, size, dataset.train_times)
        parts = of_available(parts, available)
        by_time = [
            gains(_rank(parts[name], examples)).mean() for name in BY_COUNTS if name in parts
        ]
        if by_time[-1] <= by_time[0]:
            retrieval = replace(retrieval, recent=None)
        target = TrainedTarget.load(workspace)
        candidates, alone, examples = decode_candidates(
            retrieval, examples, config, target, available=available, end=by(DECODED)
        )
        further: dict[str, Ranker] = {PAIR_RULES: retrieval.item_item}
        if known is not None:
            further["SASRec"] = known[0]
        parts |= of_available(further, available)
        ranks = {name: _rank(part, examples) for name, part in parts.items()}
        shape = Reranker({}, config.candidates, config.nodes)
        ranks[MODEL] = alone
        choice = choose(candidates, shape, ranks, end=by(CHOSEN))
        info["validation"], reranker = choice.info, choice.reranker
        if reranker.weights and retrieval.repeats is not None:
            some = examples.sample(USERS_ADDED)
            candidates, _, _ = decode_candidates(
                retrieval, some, config, target, None, available, by(FITTED_AGAIN), again=True
            )
            choice = fit_again(candidates, reranker)
            info["validation"]["again"], reranker = choice.info, choice.reranker
        _report(info["validation"], reranker)
        if AGAIN not in reranker.sources:
            retrieval = replace(retrieval, repeats=None)
        new = _as_new(retrieval, dataset, workspace) if reranker.weights else None
        if new is not None:
            some = dataset.validation().servable(available)
            some = some.sample(min(config.users, USERS_ADDED))
            candidates, _, _ = decode_candidates(
                retrieval, some, config, target, new, available, by(FITTED_TO_NEW)
            )
            reranker = fit_new(candidates, reranker)
        served = replace(served, reranker=reranker)
    served = replace(
        served,
        recent=None if retrieval.recent is None else served.recent,
        repeats=None if retrieval.repeats is None else served.repeats,
    )
    info["seconds"] = round(time.perf_counter() - start, 1)
    with output.write(info) as folder:
        served.save(folder)
        retrieval.save_trained(folder)
    return output.path


def fit(
    dataset: Dataset,
    rules: PairRules,
    ids: Path,
    content: NDArray[np.float32] | None = None,
) -> tuple[Retrieval, Retrieval]:
    """Fit neighbours, popularity and vectors without a blend, on training and on all events.

    Args:
        dataset: canonical data.
        rules: of counting pairs.
        ids: the run's `ids` artifact, which may have features.
        content: (items, F) further features with the same weight, or None.
    """
    features, vectors = ids / "features.npy", None
    known = [np.load(features, "r", allow_pickle=False)] if features.is_file() else []
    known += [] if content is None else [content]
    if known:
        ends = np.cumsum([part.shape[1] for part in known])
        joined = np.empty((len(dataset.item_ids), ends[-1]), np.float32)
        for part, end in zip(known, ends, strict=True):
            unit_rows(part, joined[:, end - part.shape[1] : end])
        vectors = VectorIndex(unit_rows(joined, joined))
    words = ContentIndex.of(dataset.items)
    everything = replace(dataset, split=np.full_like(dataset.split, TRAIN))
    trained, served = (
        replace(_count(events, rules), vectors=vectors, content=words)
        for events in (dataset, everything)
    )
    return trained, served


def _count(dataset: Dataset, rules: PairRules) -> Retrieval:
    """What is counted of the training events."""
    events, size = dataset.interactions, len(dataset.item_ids)
    trained = dataset.split == TRAIN
    histories = dataset.train_histories
    times = events.timestamp[trained] if events.has_time else None
    counts = partial(decayed_counts, events.item[trained], size, timestamps=times)
    span = 0.0 if times is None or not len(times) else float(np.ptp(times)) / DAY
    return Retrieval(
        ItemItem.count(histories, size, rules),
        counts(),
        types=EventTypes.of(histories, dataset.is_target[trained], size, dataset.behaviours, rules),
        recent=counts(half_life_days=RECENT_SHARE * span) if span else None,
        repeats=Repeats.count(that_count(histories, dataset.behaviours), size),
        fitted_on=digest(histories),
    )


def _as_new(retrieval: Retrieval, dataset: Dataset, workspace: Workspace) -> AsNew | None:
    """A part of the items treated as new; None if new ones cannot be placed, or have no content."""
    placed = workspace.run("ids") / ITEM_ENCODER / PLACED
    if not placed.is_file():
        return None
    codes = np.load(placed, allow_pickle=False)
    return AsNew.draw(retrieval, dataset.items, codes, share=SHARE_NEW, seed=0)


def decode_candidates(
    retrieval: Retrieval,
    examples: Examples,
    config: RetrievalConfig,
    target: TrainedTarget,
    new: AsNew | None = None,
    available: NDArray[np.bool_] | None = None,
    end: float = math.inf,
    *,
    again: bool = False,
) -> tuple[Candidates, NDArray[np.int64], Examples]:
    """Candidates of each example without seen items, and the model's own ranks of the targets.

    Where time ends (`end`, by `time.monotonic`) before all examples are decoded, those of a random
    sample are, at least `LEAST_DECODED`; the examples that were decoded are the third result.
    With `new`, some items are treated as new; the targets are then renumbered, and the source `new`
    is among the values. Items that are not among the `available` (items,) are no candidates. With
    `again`, items of the history are, and the source of this name is among the values.
    """
    from recsys.constraint import ItemTrie
    from recsys.decoding import SearchRequest, beam_search
    from recsys.models.tree_forward import TreeModel

    encoder, sources = target.encoder, [*retrieval.sources, *([AGAIN] if again else [])]
    alive, later = available, None if new is None else new.later
    if new is not None:
        alive = new.alive
        if available is not None:
            alive &= np.append(available, available[new.chosen])
        added = target.vocabulary.encode(new.codes)
        tokens = np.concatenate([encoder.item_tokens, added])
        encoder = replace(encoder, item_tokens=tokens)
        retrieval, examples, sources = new.retrieval, new.examples(examples), [*sources, NEW]
    tokens = encoder.item_tokens
    trie = ItemTrie.build(tokens) if alive is None else build_trie(tokens, alive)
    model = TreeModel.of(target.load_model(target.device))
    pools, alone, decoded = [], [], []
    name = "reranker" if new is None else "reranker, new items"
    for rows in parts_until(end, np.arange(len(examples)), name, BATCH, LEAST_DECODED):
        decoded.append(rows)
        histories, targets = examples.histories.take(rows), examples.targets.items[rows]
        seen = histories.left_out(not again)
        evidence = Evidence(retrieval, histories, later)
        blocked = blocked_items(len(tokens), seen, [alive] * len(rows))
        candidates = retrieval.propose(evidence, config.candidates, blocked)
        seen = seen.where(trie.item_row[seen.items] >= 0)
        request = SearchRequest(
            encoder.encode_all(histories),
            exclude=[trie.excluded_rows(items) for items in seen],
            candidates=[trie.item_row[line[line >= 0]] for line in candidates.items],
        )
        beams = beam_search(model, request, trie, config.beams)
        rows_of_beams, scores = beams.rows.cpu().numpy(), beams.scores.cpu().numpy()
        items, own = items_of_rows(trie, rows_of_beams, scores, config.beams, excluded=seen)
        alone.append(_rank_of(items, targets))
        scored = np.full((len(rows), 0), -np.inf, np.float32)  # without any candidate
        if beams.candidate_scores is not None:
            scored = beams.candidate_scores.cpu().numpy()
        pool = Pool.of(items, own, candidates, scored)
        pools.append((pool.distinct, pool.values(sources)))
    width = max(items.shape[1] for items, _ in pools)

    def together(parts: list[NDArray[Any]], fill: float) -> NDArray[Any]:
        wide = [np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=fill) for p in parts]
        return np.concatenate(wide)

    values = {
        source: together([given[source].astype(np.float32) for _, given in pools], 0)
        for source in pools[0][1]
    }
    items = together([items for items, _ in pools], -1)
    examples = examples.take(np.concatenate(decoded))
    return Candidates(items, values, examples.targets.items), np.concatenate(alone), examples


def _rank(part: Any, examples: Examples) -> NDArray[np.int64]:
    """(n,) ranks of the targets in the lists of a baseline."""
    items, _ = part.rank(examples.histories, TOP, True)
    return _rank_of(items, examples.targets.items)


def _rank_of(items: NDArray[np.int32], targets: NDArray[np.int32]) -> NDArray[np.int64]:
    """(n,) place of the wanted item in each list; a large number if it is not in it."""
    hit = items == targets[:, None]
    return np.where(hit.any(axis=1), hit.argmax(axis=1), MISSED)


def _report(validation: dict[str, Any], reranker: Reranker) -> None:
    """Print NDCG@10 and Recall@10 of all parts, and how items of the history are treated."""
    table = Table("ranker", "NDCG@10", "Recall@10", title="Validation, seen items left out")
    for name, figures in validation["parts"].items():
        if name == "served":  # one of the others
            continue
        table.add_row(name, *(f"{figures[key]:.4f}" for key in ("ndcg@10", "recall@10")))
    console.print(table)
    served = validation["served"]
    if served == RERANKER:
        say("The served list is the one of the reranker: a blend of the model and other sources.")
    elif served == MODEL:
        say("The served list is the model's own, which ranks better than a blend.")
    else:
        say(f"The served list is that of {served!r} alone, which ranks better than a blend.")
    if "always" in (again := validation.get("again", {})):
        always, never = (again[name]["ndcg@10"] for name in ("always", "never"))
        say(
            f"Lists with items of the history have an NDCG@10 of {always:.4f}, without them "
            f"{never:.4f}. They are {'' if reranker.lists_seen else 'not '}listed by default "
            "(exclude_seen)."
        )
    say("Figures are of counts of training events; what is served has counted all events.")
    if validation["users"] < LEAST_USERS:
        say(
            f"{validation['users']} validation users are too few to choose what is served, so it "
            "may be below popularity by chance"
        )
