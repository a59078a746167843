"""Protocol, report and stage: what is asked, what is measured, and what a person is shown."""

import json
import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from oracles import interactions_of

from recsys.artifacts import Workspace, read_manifest, verify, write_artifact
from recsys.catalog import Catalog
from recsys.config import Settings
from recsys.dataset import Dataset
from recsys.errors import ArtifactError, DataError
from recsys.evaluation import report, run
from recsys.evaluation.baselines import Popularity, fit_baselines, of_available
from recsys.evaluation.compare import compare
from recsys.evaluation.gate import count_compared, evaluate_alike, with_enough_users
from recsys.evaluation.protocol import EvaluationConfig, evaluate, find
from recsys.interactions import Histories
from recsys.pipeline import Context
from recsys.retrieval import ItemItem, Reranker, digest
from recsys.splits import label_ends

ITEMS, USERS = 40, 60
PAIRS = ItemItem.count(Histories.of([[0, 1]]), ITEMS)
SMALL = EvaluationConfig(ks=(1, 5, 10), resamples=60)


class Fixed:
    """Lists the same items for everyone, without the seen ones if asked; remembers its calls."""

    def __init__(self, items):
        self.items = items
        self.calls = []

    def rank(self, histories, k, exclude_seen):
        self.calls.append((len(histories), k, exclude_seen))
        out = np.full((len(histories), k), -1, np.int32)
        for row, history in enumerate(histories):
            seen = set(history.tolist()) if exclude_seen else set()
            items = [i for i in self.items if i not in seen][:k]
            out[row, : len(items)] = items
        return out, np.zeros(out.shape, np.float32)


def dataset_of(sequences, split=None, items=ITEMS):
    """A data set of users' item ids; leave-one-out unless labels are given."""
    events = interactions_of(
        [user for user, taken in sequences.items() for _ in taken],
        [item for taken in sequences.values() for item in taken],
        item_ids=np.asarray([f"i{i}" for i in range(items)]),
    )
    labels = label_ends(events.user) if split is None else np.asarray(split, np.uint8)
    titles = [f"Tom & Jerry <{i}>" if i % 2 else "" for i in range(items)]
    table = pa.table({"item_id": list(events.item_ids), "title": titles, "text": [""] * items})
    return Dataset(events, labels, table)


@pytest.fixture(scope="module")
def shop():
    """Sixty users who walk up the catalog, in steps of one, with a jump now and then."""
    rng = np.random.default_rng(0)
    sequences = {}
    for user in range(USERS):
        steps = np.where(rng.random(int(rng.integers(3, 26))) < 0.8, 1, rng.integers(2, 9))
        walk = (rng.integers(ITEMS) + np.cumsum(steps)) % ITEMS
        sequences[f"u{user}"] = [f"i{i}" for i in dict.fromkeys(walk.tolist())]
    return dataset_of({user: taken for user, taken in sequences.items() if len(taken) >= 3})


@pytest.fixture(scope="module")
def result(shop):
    baselines = fit_baselines(shop.train_histories, ITEMS)
    return evaluate({"model": baselines.pop("directional"), **baselines}, shop, SMALL)


@pytest.fixture(scope="module")
def page(shop, result):
    health = {
        "items": ITEMS, "levels": 2, "codebook_size": [8, 8], "used_codes": [8, 7],
        "perplexity": [7.5, 6.9], "prefixes": [8, 39], "branching": [8.0, 4.875],
        "colliding_items": 2, "colliding_leaves": 1, "largest_leaf": 2,
    }  # fmt: skip
    made_from = {"bundle": "0123456789abcdef", "dataset": "fedcba9876543210"}
    return report.document(
        result, shop, name="<demo>", made_from=made_from, semantic_ids=health, warnings=["Mind!"]
    )


@pytest.fixture(scope="module")
def text(page):
    return report.render(page)


def test_a_tiny_case_written_by_hand():
    """Test events: a -> i3 after [i0 i1 i2], b -> i0 after [i5 i6 i7]; everyone is told i0 i3."""
    shop = dataset_of({"a": ["i0", "i1", "i2", "i3"], "b": ["i5", "i6", "i7", "i0"]}, items=8)
    found = evaluate({"model": Fixed([0, 3])}, shop, EvaluationConfig(ks=(1, 2), resamples=10))

    def mean(seen, metric, k):
        about = {"seen": seen, "targets": "next", "metric": metric, "k": k}
        return float(find(found.metrics, ranker="model", **about)["mean"])

    assert mean("masked", "recall", 1) == 1.0  # a has seen i0, so its list begins with i3
    assert mean("unmasked", "recall", 1) == 0.5
    assert mean("unmasked", "recall", 2) == 1.0
    assert mean("unmasked", "mrr", 2) == 0.75
    assert mean("unmasked", "ndcg", 2) == pytest.approx((1 + 0.63093) / 2, abs=1e-5)
    assert find(found.coverage, seen="masked", k=1)["coverage"] == 2 / 8
    assert find(found.coverage, seen="masked", k=2)["short_share"] == 0.5
    # i0 is in a's training events, i3 in nobody's.
    about = {"by": "target_popularity", "seen": "masked", "metric": "recall", "k": 1}
    assert find(found.segments, segment="0 (cold)", **about)["users"] == 1
    assert find(found.segments, segment="1–4", **about)["users"] == 1
    assert found.facts["cold_share"] == {"next": 0.5, "all": 0.5}


def test_next_and_all_future_targets_come_from_one_ranking():
    """The user's three test events hold i4 twice: two distinct targets, one of them listed."""
    shop = dataset_of({"a": ["i0", "i1", "i4", "i4", "i5"]}, split=[0, 0, 2, 2, 2])
    ranker = Fixed([9, 4])
    found = evaluate({"model": ranker}, shop, EvaluationConfig(ks=(2,), resamples=5))
    assert ranker.calls == [(1, 2, True), (1, 2, False)]
    about = {"seen": "masked", "metric": "recall", "k": 2}
    assert find(found.metrics, targets="next", **about)["mean"] == 1.0
    assert find(found.metrics, targets="all", **about)["mean"] == 0.5
    assert found.facts["targets"] == {"next": 1, "all": 3}


def test_targets_that_are_unavailable_now_are_left_out():
    """Of three users, b's next event is on i4, which is sold out; a's second target is i4, too."""
    walks = {"a": [0, 1, 3, 4], "b": [5, 6, 4, 2], "c": [1, 0, 6, 6]}
    shop = dataset_of(
        {user: [f"i{i}" for i in walk] for user, walk in walks.items()}, split=[0, 0, 2, 2] * 3
    )
    available = np.arange(10) != 4
    config = EvaluationConfig(ks=(2,), resamples=5, seen="masked")
    known = Popularity(np.array([0, 0, 0, 2, 3, 0, 1, 0, 0, 0]))
    rankers = {"model": Fixed([6, 3])} | of_available({"known": known}, available)
    found = evaluate(rankers, shop, config, available=available)
    assert found.users.tolist() == [0, 2]
    assert [items.tolist() for items in found.targets["all"]] == [[3], [6]]
    assert found.facts["unavailable"] == {"items": 1, "users": 1}
    about = {"targets": "next", "metric": "recall", "k": 2}
    assert find(found.metrics, ranker="model", **about)["mean"] == 1.0
    assert find(found.metrics, ranker="known", **about)["mean"] == 1.0  # i3 and i6 move up
    with pytest.raises(ValueError, match="model: recommends an item that is not available"):
        evaluate({"model": Fixed([4])}, shop, config, available=available)
    page = report.document(found, shop, name="x", made_from={})
    assert "1 of 3 users are left out, because" in " ".join(report.headline(page))
    only = np.isin(np.arange(10), [0, 1])  # no next event is on one of these
    found = evaluate({"model": Fixed([1])}, shop, config, available=only)
    assert len(found.users) == 3
    assert find(found.metrics, **about)["mean"] == 0
    page = report.document(found, shop, name="x", made_from={})
    assert "every list misses it" in " ".join(report.headline(page))
    del page["served_has_seen_all"]  # as in a report of a former version
    assert "every list misses it" in " ".join(report.headline(page))


class Stocked(Popularity):
    """Popularity of items in stock, as a bundle that was made when others were sold out."""

    def __init__(self, counts, sold_out):
        super().__init__(counts)
        alive = ~np.isin(np.arange(len(counts)), sold_out)
        self.__dict__["recommender"] = SimpleNamespace(epoch=SimpleNamespace(alive=alive))

    def rank(self, histories, k, exclude_seen):
        sold_out = np.flatnonzero(~self.recommender.epoch.alive)
        return super().rank(histories.hiding(sold_out), k, exclude_seen)


def test_the_gate_compares_lists_of_the_same_stock(shop):
    """The challenger is the same model, made after the two best sellers had sold out."""
    counts = np.bincount(shop.train_histories.items, minlength=ITEMS)
    best = np.argsort(-counts)[:2]
    rankers = {"challenger": Stocked(counts, best), "champion": Stocked(counts, [0])}
    config = EvaluationConfig(ks=(5,), resamples=5, seen="masked")
    found = evaluate_alike(rankers, shop, config)
    challenger, champion = (
        find(found.metrics, ranker=name, targets="next", metric="recall", k=5)["mean"]
        for name in rankers
    )
    assert challenger == champion > 0
    gone = np.append(best, 0)
    expected = np.isin(shop.examples("test").targets.items, gone).sum()
    assert found.facts["unavailable"] == {"items": 3, "users": expected}


def test_the_users_of_the_gate_are_counted_without_models(shop):
    """Items 0 and 1 are sold out now, and item 2 was when the champion was made."""
    rankers = {
        "challenger": Stocked(np.ones(ITEMS), [0, 1]),
        "champion": Stocked(np.ones(ITEMS), [2]),
    }
    config = EvaluationConfig(ks=(5,), resamples=5, seen="masked")
    available = ~np.isin(np.arange(ITEMS), [0, 1, 2])
    asked = with_enough_users(shop, available)  # those of the validation window, too
    compared = len(evaluate_alike(rankers, asked, config).users)
    stock = [
        shop.items.append_column("available", pa.array(~np.isin(np.arange(ITEMS), gone)))
        for gone in ([0, 1], [2])
    ]
    counted = count_compared(replace(shop, items=stock[0]), stock[1].slice(0, ITEMS - 3), now=0)
    assert counted == compared < len(asked.examples("test"))
    assert count_compared(shop, shop.items, now=0) == len(asked.examples("test"))
    expired = shop.items.append_column("available_until", pa.array([5.0] * ITEMS))
    assert count_compared(replace(shop, items=expired), shop.items, now=4) > 0
    assert count_compared(replace(shop, items=expired), shop.items, now=5) == 0


def test_baselines_of_available_items_are_those_of_a_catalog(shop, monkeypatch):
    rankers, asked = fit_baselines(shop.train_histories, ITEMS), shop.examples("test").histories
    available = np.random.default_rng(1).random(ITEMS) < 0.5
    monkeypatch.setattr("recsys.evaluation.baselines.MOST_HIDDEN", 50)
    for name, ranker in of_available(rankers, available).items():
        whole, _ = rankers[name].rank(asked, ITEMS, True)
        found, scores = ranker.rank(asked, 5, True)
        for row, full in enumerate(whole):
            expected = [i for i in full.tolist() if i >= 0 and available[i]][:5]
            assert found[row].tolist() == expected + [-1] * (5 - len(expected))
            assert np.isfinite(scores[row]).sum() == len(expected)


def test_a_sample_depends_on_the_seed_and_keeps_users_targets(shop):
    config = replace(SMALL, users=20)
    first, again, other = (
        evaluate({"model": Fixed([1])}, shop, replace(config, seed=seed)) for seed in (1, 1, 2)
    )
    assert first.users.tolist() == again.users.tolist() != other.users.tolist()
    assert len(first.users) == 20
    everything = shop.examples("test")
    rows = np.searchsorted(everything.users, first.users)
    assert first.targets["next"].items.tolist() == everything.targets.items[rows].tolist()


def test_segments_divide_the_users_and_average_to_the_whole(result):
    for by in ("target", "target_popularity", "history_length"):
        about = {"ranker": "model", "seen": "masked", "metric": "recall", "k": 10}
        rows = [r for r in result.segments if r["by"] == by and about.items() <= r.items()]
        users = np.asarray([row["users"] for row in rows])
        assert users.sum() == len(result.users)
        whole = find(result.metrics, targets="next", **about)["mean"]
        means = np.asarray([row["mean"] for row in rows])
        assert (users * means).sum() / users.sum() == pytest.approx(whole, abs=1e-5)


def test_segments_begin_at_their_lower_bounds():
    bounds = {"1–2": [2], "3–4": [3, 4], "5–9": [5, 9], "10–19": [10, 19], "20+": [20]}
    for segment, lengths in bounds.items():
        for length in lengths:
            shop = dataset_of({"a": [f"i{i}" for i in range(length + 1)]})
            found = evaluate({"model": Fixed([1])}, shop, SMALL)
            names = {row["segment"] for row in found.segments if row["by"] == "history_length"}
            assert names == {segment}


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([1, 1] + [-1] * 8, "twice"),
        ([-1, 1] + [-1] * 8, "after the end"),
        ([ITEMS] + [-1] * 9, "must lie in"),
        ([-2] + [-1] * 9, "must lie in"),
        (list(range(10)), "masked item of the history"),
    ],
)
def test_malformed_lists_are_refused_with_the_rankers_name(shop, items, text):
    ranker = SimpleNamespace(
        rank=lambda given, k, masked: (np.tile(np.int32(items), (len(given), 1)), 0.0)
    )
    with pytest.raises(ValueError, match=f"sloppy: .*{text}"):
        evaluate({"sloppy": ranker}, shop, SMALL)


def test_a_session_within_the_split_is_no_leak():
    """Session b lies in the test split; it is asked for its second event, not for its first."""
    walks = {"a": ["i0", "i1", "i2"], "b": ["i3", "i4", "i5"]}
    shop = replace(dataset_of(walks, split=[0, 0, 2, 2, 2, 2]), sessions=True)
    found = evaluate({"model": Fixed([4])}, shop, EvaluationConfig(ks=(1,), resamples=5))
    assert [items.tolist() for items in found.histories] == [[0, 1], [3]]
    assert found.targets["next"].items.tolist() == [2, 4]


def test_the_page_escapes_what_comes_from_outside_and_fetches_nothing(text):
    assert "://" not in text
    assert "<script" not in text
    assert not re.search(r"url\((?!#)|@import|(src|href)=\"[^#]", text)
    assert "<demo>" not in text
    assert "&lt;demo&gt;" in text
    assert "Tom &amp; Jerry &lt;" in text
    assert "Mind!" in text, "a warning is shown"


def test_figures_of_baskets_are_of_all_their_items():
    """Each user has two items in the test basket; a list that has the second one finds half."""
    sequences = {f"u{n}": ["i0", "i1", "i2", "i3"] for n in range(20)}
    shop = dataset_of(sequences, split=[0, 1, 2, 2] * 20)
    shop = replace(shop, baskets=True)
    found = evaluate({"model": Fixed([3])}, shop, SMALL)
    assert found.config.targets == "all"
    page = report.document(found, shop, name="orders", made_from={})
    first, why, *_ = report.headline(page)
    assert "Recall@10 0.5000: the first 10 hold 50.0% of the items that a user has" in first
    assert "accident of the file" in why
    assert page["headline"]["targets"] == "all"
    found = evaluate({"model": Fixed([3])}, replace(shop, baskets=False), SMALL)
    sentences = report.headline(report.document(found, shop, name="clicks", made_from={}))
    assert "Recall@10 0.0000: the first 10 hold the next event" in sentences[0]
    assert "accident" not in " ".join(sentences)


@pytest.fixture(scope="module")
def scarce():
    """Everybody is told i0, i3, i6; the baseline says i0, i1, i2.

    Training: i0, i1, i2 once each (a), i5 three times. Targets: i3 of a (cold), i6 of b (cold), i2
    of c (one event), i0 of d (one event). Histories: a has four events, the others two.
    """
    shop = dataset_of(
        {"a": ["i0", "i1", "i2", "i4", "i3"], "b": ["i5", "i7", "i6"], "c": ["i5", "i7", "i2"],
         "d": ["i5", "i7", "i0"]},
        items=8,
    )  # fmt: skip
    config = EvaluationConfig(ks=(2,), resamples=50, seen="masked", examples=0)
    rankers = {"model": Fixed([0, 3, 6]), "popularity": Fixed([0, 1, 2])}
    return shop, evaluate(rankers, shop, config)


def test_users_and_items_with_few_events_are_set_beside_simple_baselines(scarce):
    """With two places: a is told i3 i6 (a hit), b, c and d i0 i3 (a hit for d)."""
    shop, found = scarce
    page = report.document(found, shop, name="x", made_from={})
    rows = {row["group"]: row for row in report.cold_rows(page)}
    assert set(rows) == {
        "items without training events",
        "items with 1–4 training events",
        "users with one or two events",
    }
    cold, few, users = (rows[name]["rankers"] for name in rows)
    assert [rows[name]["users"] for name in rows] == [2, 2, 3]
    assert (cold["model"]["mean"], cold["popularity"]["mean"]) == (0.5, 0.0)
    assert (few["model"]["mean"], few["popularity"]["mean"]) == (0.5, 0.5)
    assert users["model"]["mean"] == pytest.approx(1 / 3, abs=1e-6)
    assert (cold["popularity"]["gap"], few["popularity"]["gap"]) == (0.5, 0.0)
    assert cold["popularity"]["gap_low"] <= 0.5 <= cold["popularity"]["gap_high"]
    assert cold["model"]["gap"] == cold["model"]["gap_low"] == 0


def test_a_baseline_that_is_better_where_little_is_known_is_named():
    """Ten users with two events want i1, which the baseline names and the model does not."""
    shop = dataset_of({f"u{i}": ["i5", "i4", "i1"] for i in range(10)}, items=8)
    config = EvaluationConfig(ks=(2,), resamples=50)
    rankers = {"model": Fixed([6, 7]), "popularity": Fixed([1, 2])}
    told = run._cold_weaknesses(evaluate(rankers, shop, config))
    assert any("users with one or two events (10 users)" in line for line in told)
    assert all("worse than popularity: Recall@2 -1.0000" in line for line in told)


def test_metrics_can_be_computed_again_from_the_rows_of_users(shop, result):
    rows = report.per_user(result, shop).to_pandas()
    assert len(rows) == 4 * 2 * len(result.users)
    for (ranker, seen), part in rows.groupby(["ranker", "seen"], observed=True):
        for k in SMALL.ks:
            about = {"ranker": ranker, "seen": seen, "metric": "recall", "k": k}
            by_rank = (part["rank"] <= k).fillna(False).mean()
            assert find(result.metrics, targets="next", **about)["mean"] == pytest.approx(
                by_rank, abs=1e-6
            )
            of_all = (part[f"hits_at_{k}"] / part["targets"]).mean()
            assert find(result.metrics, targets="all", **about)["mean"] == pytest.approx(
                of_all, abs=1e-6
            )


class FakeRecommender:
    """Stands where a loaded bundle would."""

    loaded = 0
    retrieval: Any = None
    exclude_seen = True
    catalog_items = ITEMS
    items = tuple(range(ITEMS))
    device = torch.device("cpu")

    def __init__(self, path):
        self.manifest = read_manifest(path, "bundle")
        codes = np.stack(np.unravel_index(np.arange(self.catalog_items), (8, 8)), axis=1)
        ids = [f"i{i}" for i in range(self.catalog_items)]
        table = pa.table({"item_id": ids, "title": ids, "text": ids})
        self.bundle = SimpleNamespace(catalog=Catalog(table, codes.astype(np.int32)))
        self.epoch = SimpleNamespace(alive=np.ones(self.catalog_items, np.bool_))
        self.asked = []

    @classmethod
    def load(cls, path, device="cpu", dtype="float32", trained=True):
        FakeRecommender.loaded += 1
        return cls(path)

    def rank_histories(self, histories, k, exclude_seen, *, beams=None, batch_size=64):
        self.asked.append((beams, batch_size))
        found = []
        for masked in exclude_seen:
            own = Fixed(list(self.items)).rank(histories, k, masked)
            other = Fixed(list(self.items)[::-1]).rank(histories, k, masked)
            found.append((own if self.retrieval is None else other, own))
        return found


@pytest.fixture
def context(tmp_path, shop, monkeypatch):
    module = SimpleNamespace(Recommender=FakeRecommender)
    monkeypatch.setitem(sys.modules, "recsys.recommender", module)
    for name in ("run", "rankings"):
        ranks = FakeRecommender.rank_histories
        monkeypatch.setattr(f"recsys.evaluation.{name}.rank_histories", ranks)
    monkeypatch.setattr("recsys.progress.LINE_EVERY_S", math.inf)  # lines do not depend on load
    workspace = Workspace(tmp_path, "demo")
    with write_artifact(workspace.dataset, "dataset") as folder:
        shop.save(folder)
    parents = {"dataset": Dataset.manifest(workspace.dataset).digest}
    with write_artifact(workspace.bundle, "bundle", parents=parents) as folder:
        (folder / "x.json").write_text("{}")
    settings = Settings({"name": "demo", "evaluate": {"ks": [5, 10], "resamples": 20}})
    return Context(settings, workspace)


def test_the_stage_writes_an_artifact_and_prints_its_tables(context, capsys):
    path = run.stage(context)
    manifest = verify(path, "evaluation")
    assert set(manifest.files) == {"report.json", "report.html", "users.parquet"}
    assert set(manifest.parents) == {"bundle", "dataset"}
    document = json.loads((path / "report.json").read_text(encoding="utf-8"))
    names = "model, popularity, item-kNN, directional, successors, pair rules"
    assert ", ".join(document["rankers"]) == names
    assert document["semantic_ids"]["colliding_items"] == 0
    assert document["warnings"] == []
    assert (
        pq.read_table(path / "users.parquet").num_rows == 12 * document["data"]["users_evaluated"]
    )
    shown = capsys.readouterr().err
    assert "TEST" in shown
    assert "directional" in shown


def test_an_up_to_date_report_is_shown_but_not_recomputed(context, capsys):
    run.stage(context)
    before = FakeRecommender.loaded
    first = capsys.readouterr().err.splitlines()
    run.stage(context)
    assert FakeRecommender.loaded == before
    assert capsys.readouterr().err.splitlines() == first
    run.stage(replace(context, force=True))
    assert FakeRecommender.loaded == before + 1
    other = Settings({**context.settings.values, "seed": 5})
    run.stage(replace(context, settings=other))
    assert FakeRecommender.loaded == before + 2


def test_beams_and_users_in_time_reach_the_model(context, monkeypatch, tmp_path):
    made = []
    plain = FakeRecommender.load.__func__

    def load(path, device, dtype, trained):
        made.append(plain(FakeRecommender, path))
        return made[-1]

    monkeypatch.setattr(FakeRecommender, "load", load)
    monkeypatch.setattr(run, "_in_time", lambda config, *_: replace(config, users=20))
    workspace = context.workspace
    config = EvaluationConfig(ks=(5,), beams=33, batch_size=16, resamples=5)
    out = run.evaluate_bundle(workspace.bundle, workspace.dataset, config, tmp_path / "out")
    assert out == tmp_path / "out"
    assert set(made[0].asked) == {(33, 16)}
    (warning,) = json.loads((out / "report.json").read_text(encoding="utf-8"))["warnings"]
    assert warning.startswith("20 of "), warning


def test_a_bundle_of_another_catalog_is_refused(context, monkeypatch):
    monkeypatch.setattr(FakeRecommender, "catalog_items", ITEMS - 1)
    with pytest.raises(ArtifactError, match="39 items"):
        run.stage(context)
    assert not context.workspace.report.exists()


def rebuilt(context, *files, parents=None, **info):
    """Write the bundle of a context anew, with these files."""
    own = {"dataset": Dataset.manifest(context.workspace.dataset).digest}
    bundle = context.workspace.bundle
    with write_artifact(bundle, "bundle", parents=parents or own, info=info) as folder:
        for name, text in [("x.json", "{}"), *files]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def asked_users(count):
    return {"files": [("eval/validation.json", json.dumps({"retrieval": {"users": count}}))]}


@pytest.mark.parametrize(
    ("bundle", "words"),
    [
        ({"parents": {"dataset": "another"}}, "another"),
        ({"files": [("catalog/quantizer/x.json", "{}")]}, "semantic IDs learned from"),
        (asked_users(7), "7 validation users are too few"),
        (asked_users(0), "0 validation users are too few"),
        (asked_users(8), None),
        ({"files": []}, None),
        ({}, None),
    ],
    ids=["split", "ids", "seven", "none", "eight", "unknown", "plain"],
)
def test_what_may_be_wrong_with_figures_is_a_warning(context, monkeypatch, bundle, words):
    plain = SimpleNamespace(
        reranker=None, counts=np.zeros(ITEMS), vectors=None, item_item=PAIRS,
        fitted_on=digest(Dataset.load(context.workspace.dataset).train_histories),
    )  # fmt: skip
    if "files" in bundle:
        monkeypatch.setattr(FakeRecommender, "retrieval", plain)
    rebuilt(context, *bundle.get("files", ()), parents=bundle.get("parents"))
    path = run.stage(context)
    warnings = json.loads((path / "report.json").read_text(encoding="utf-8"))["warnings"]
    assert len(warnings) == (words is not None), warnings
    if words is not None:
        assert words in warnings[0]
        assert "may have learned" in (path / "report.html").read_text() or words != "another"


def test_semantic_ids_of_other_events_are_refused(context, shop):
    rebuilt(context, ids_fitted_on=digest(shop.train_histories))
    run.stage(context)
    rebuilt(context, ids_fitted_on=digest(shop.interactions.histories))  # all events
    with pytest.raises(DataError, match="leak: the bundle's semantic IDs"):
        run.stage(replace(context, force=True))


def test_a_bundle_that_blends_is_measured_beside_its_model_alone(context, monkeypatch):
    weights, alike = {"popularity": 1.0}, SimpleNamespace(vectors=np.ones((ITEMS, 1)))
    retrieval = SimpleNamespace(
        reranker=Reranker(weights), counts=np.zeros(ITEMS), fitted_on=None, vectors=alike,
        item_item=PAIRS,
    )  # fmt: skip
    monkeypatch.setattr(FakeRecommender, "retrieval", retrieval)
    document = json.loads((run.stage(context) / "report.json").read_text(encoding="utf-8"))
    assert document["rankers"][:2] == ["blended", "model"]
    about = {"seen": "unmasked", "targets": "next", "metric": "recall", "k": 10}
    means = {name: find(document["metrics"], ranker=name, **about)["mean"] for name in
             ("blended", "model")}  # fmt: skip
    gap = find(document["comparisons"], ranker="blended", against="model", **about)
    assert gap["mean"] == pytest.approx(means["blended"] - means["model"], abs=2e-6)
    (shown,) = (row for row in document["coverage"] if row["k"] == 10 and row["seen"] == "masked"
                and row["ranker"] == "model")  # fmt: skip
    assert shown["diversity"] == 0, "all vectors are the same"
    assert means["blended"] != means["model"]  # one lists the items from the other end
    assert any("The model alone is below item-kNN" in line for line in document["weaknesses"])
    assert any("The served list is worse than item-kNN" in line for line in document["weaknesses"])


def test_a_retrieval_that_has_seen_the_split_is_refused(context, shop, monkeypatch):
    retrieval = SimpleNamespace(reranker=None, item_item=PAIRS, vectors=None)
    retrieval.fitted_on = digest(shop.interactions.histories)  # all events
    monkeypatch.setattr(FakeRecommender, "retrieval", retrieval)
    with pytest.raises(DataError, match="leak: the bundle's retrieval learned"):
        run.stage(context)
    retrieval.fitted_on = None
    path = run.stage(context)
    (warning,) = json.loads((path / "report.json").read_text(encoding="utf-8"))["warnings"]
    assert "does not say which events" in warning
    timed = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["info"]
    assert timed["ranking_seconds"].keys().isdisjoint(("model", "blended"))


def test_reports_are_compared_user_by_user(context, monkeypatch, tmp_path):
    """The second report is of a model that lists other items."""
    path = run.stage(context)
    monkeypatch.setattr(FakeRecommender, "items", tuple(range(ITEMS))[::-1])
    other = run.stage(context, out=tmp_path / "other")
    documents = [json.loads((p / "report.json").read_text(encoding="utf-8")) for p in (path, other)]
    found = compare(path, other)
    assert {row["metric"] for row in found["rows"]} == {"recall", "ndcg"}
    for row in found["rows"]:
        about = {"seen": row["seen"], "targets": "next", "metric": row["metric"], "k": 10}
        for side, document in zip("ab", documents, strict=True):
            mean = find(document["metrics"], ranker="model", **about)["mean"]
            assert row[side] == pytest.approx(mean, abs=2e-6)
        assert row["low"] <= row["mean"] <= row["high"]
        assert row["mean"] == pytest.approx(row["a"] - row["b"], abs=2e-6) != 0
    same = compare(path, path)["rows"][0]
    assert (same["mean"], same["low"], same["high"]) == (0, 0, 0)
    few = Settings({"name": "demo", "evaluate": {"ks": [5], "resamples": 20}})
    short = run.stage(replace(context, settings=few), out=tmp_path / "short")
    with pytest.raises(DataError, match="lists of 5"):
        compare(path, short)


def test_reports_of_other_users_or_splits_cannot_be_paired(context, tmp_path):
    path = run.stage(context)
    few = Settings({"name": "demo", "evaluate": {"ks": [5, 10], "resamples": 20, "users": 20}})
    other = run.stage(replace(context, settings=few), out=tmp_path / "few")
    with pytest.raises(DataError, match="other users"):
        compare(path, other)
    valid = Settings({"name": "demo", "evaluate": {"ks": [10], "resamples": 20, "split": "valid"}})
    other = run.stage(replace(context, settings=valid), out=tmp_path / "valid")
    with pytest.raises(DataError, match="split"):
        compare(path, other)
    with pytest.raises(ArtifactError, match="not an artifact"):
        compare(path, tmp_path / "nothing")


@pytest.mark.parametrize(
    ("end", "users"), [(1e9, None), (1000.0, 306), (12.0, run.LEAST_EVALUATED)]
)
def test_the_report_has_the_users_for_whom_there_is_time(monkeypatch, end, users):
    """64 users take 64 seconds, half of them with the model, and the first call a minute more."""
    now = [0.0]

    def rank(histories, *_, **__):
        now[0] += len(histories) / 2 + 60 * (now[0] == 0)

    dataset = dataset_of({f"u{n}": ["i0", "i1", "i2", "i3"] for n in range(800)})
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(run, "rank_histories", lambda model, histories, *_, **__: rank(histories))
    config = run._in_time(
        EvaluationConfig(seen="masked"),
        SimpleNamespace(),
        {"baseline": SimpleNamespace(rank=rank)},
        dataset.examples("test"),
        end,
    )
    assert config.users == users
