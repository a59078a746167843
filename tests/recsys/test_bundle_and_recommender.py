"""From a bundle on disk to recommendations: held to brute force, and to themselves bit by bit."""

import gc
import multiprocessing
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import PATIENCE_S, assert_as_exact, tiny_model
from toy_bundle import counted_codes, items_table, log_probs, write_bundle

from recsys.artifacts import read_manifest
from recsys.bundle import PROMPTS, TARGET, Bundle
from recsys.errors import ArtifactError, FilterError
from recsys.evaluation.rankings import rank_histories
from recsys.interactions import Histories
from recsys.live import NewItem
from recsys.models.prefix_store import Block
from recsys.native.library import OFF
from recsys.prompts import PromptConfig
from recsys.recommender import Recommender, RecommendRequest
from recsys.vocabulary import Vocabulary
from recsys.warm_up import warm_up

ITEMS = 48
LEVELS = (5, 4, 3)
PROMPT = PromptConfig(max_items=6, block=2)
# Items 44 and 45 share the leaf of item 0, item 46 that of item 7, and 47 that of 46.
CODES = counted_codes(ITEMS, LEVELS)
CODES[[44, 45, 46, 47]] = CODES[[0, 0, 7, 7]]
TABLE = items_table([f"id-{i}" for i in range(ITEMS)], [f"Thing {i}" for i in range(ITEMS)])

REQUESTS = [
    RecommendRequest([f"id-{i}" for i in history], k, seen, [f"id-{i}" for i in excluded])
    for history, k, seen, excluded in [
        ([], 10, True, []),
        ([3], 10, True, []),
        ([3], 25, True, []),
        ([0, 44], 30, True, []),
        ([0, 44, 45], 48, True, [3, 7]),
        ([5, 6, 7, 8, 9, 10], 1, True, []),
        ([5, 6, 7, 8, 9, 10, 11], 20, False, []),
        (list(range(40)), 20, True, []),
        (list(range(40)), 25, False, [41]),
        ([47, 1, 47, 999], 21, True, [998]),
        ([12, 12, 12], 2, False, list(range(10))),
        ([20, 21], 100, True, []),
    ]
]


def build(path, table=TABLE, codes=CODES, **parts):
    """Write a bundle; any part may be another than the usual one."""
    # As wide as the smallest preset: kernels, and so the last bits, depend on the width.
    target = tiny_model(vocabulary=Vocabulary.from_levels(LEVELS).size, hidden=128)
    return write_bundle(path, table, codes, LEVELS, target=target, **parts)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return build(tmp_path_factory.mktemp("bundle") / "tiny")


@pytest.fixture(scope="module")
def recommender(bundle):
    return Recommender.load(bundle)


@pytest.fixture(scope="module")
def exact(bundle):
    """The same in float64."""
    return Recommender.load(bundle, dtype="float64")


def scores_of(result):
    return [r.score for r in result.recommendations]


@pytest.fixture
def copy(bundle, tmp_path):
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


def ask(recommender, history, k=10, **options):
    (result,) = recommender.recommend_batch([RecommendRequest(history, k, **options)])
    return [r.item_id for r in result.recommendations]


def brute_force(recommender, history):
    """log p of every item after a history."""
    return log_probs(recommender, history[int(PROMPT.start(len(history))) :])


# A beam as wide as the catalog leaves nothing out.
@pytest.mark.parametrize("history", [[], [3], [7, 46, 0, 0, 12], list(range(20))])
def test_the_whole_catalog_is_ranked_as_by_brute_force(recommender, exact, history):
    expected, doubles = (brute_force(r, history) for r in (recommender, exact))
    (found,) = recommender.recommend([[f"id-{i}" for i in history]], ITEMS, exclude_seen=False)
    items = [int(r.item_id[3:]) for r in found]
    assert sorted(items) == list(range(ITEMS))
    scores = [r.score for r in found]
    assert scores == sorted(scores, reverse=True)
    assert_as_exact(scores, expected[items], doubles[items])


# Items of one leaf (0, 44, 45) differ in colour; price is missing from every seventh.
COLOURED = TABLE.append_column(
    "colour", pa.array(["red" if i % 2 else "blue" for i in range(ITEMS)])
).append_column("price", pa.array([None if i % 7 == 0 else float(i) for i in range(ITEMS)]))


@pytest.fixture(scope="module")
def coloured(tmp_path_factory):
    path = tmp_path_factory.mktemp("coloured") / "tiny"
    return Recommender.load(build(path, COLOURED))


def test_invalid_filters_are_refused_before_decoding(coloured):
    with pytest.raises(FilterError, match=r"filter.must: want a list"):
        RecommendRequest(["id-3"], filter={"must": 1})
    wrong = RecommendRequest(["id-3"], filter={"must": [{"key": "size", "match": 1}]})
    for refuse in (coloured.eligible, lambda r: coloured.recommend_batch([r])):
        with pytest.raises(FilterError, match=r"no attribute 'size'; items have item_id, title"):
            refuse(wrong)


@pytest.mark.parametrize(
    ("boosts", "says"),
    [
        ("x", "boosts: want a list of boosts, got 'x'"),
        ([3], r"boosts\[0\]: want an object with filter and weight"),
        ([{"filter": {}, "weight": 1}, {"filter": {}}], r"boosts\[1\]: want an object with"),
        ([{"filter": {}, "weight": 1, "x": 2}], r"boosts\[0\]: unknown key 'x'"),
        ([{"filter": {}, "weight": "1"}], r"boosts\[0\].weight: want a number, got '1'"),
        ([{"filter": {}, "weight": -1e9}], r"boosts\[0\].weight: want -1000 .. 1000"),
        ([{"filter": {"must": 1}, "weight": 1}], r"boosts\[0\].filter.must: want a list"),
        ([{"filter": {}, "weight": 1}] * 101, "boosts: want at most 100, got 101"),
    ],
)
def test_invalid_boosts_are_refused(boosts, says):
    with pytest.raises(FilterError, match=says):
        RecommendRequest([], boosts=boosts)


def test_boosts_need_a_search_and_known_attributes(coloured):
    with pytest.raises(ValueError, match="boosts are for the best items"):
        RecommendRequest([], seed=1, boosts=[{"filter": {}, "weight": 1}])
    wrong = {"filter": {"must": [{"key": "size", "match": 1}]}, "weight": 1}
    with pytest.raises(FilterError, match=r"boosts\[0\].filter.must\[0\].key: no attribute 'size'"):
        coloured.eligible(RecommendRequest([], boosts=[wrong]))


def test_unknown_items_are_reported_and_ignored(recommender):
    (result,) = recommender.recommend_batch(
        [RecommendRequest(["gone", "id-3", "", "gone", "id-9"], 10)]
    )
    assert result.unknown_items == ["gone", "", "gone"]
    (known,) = recommender.recommend_batch([RecommendRequest(["id-3", "id-9"], 10)])
    assert known == replace(result, unknown_items=[])


def test_excluding_everything_returns_an_empty_list(recommender):
    everything = [f"id-{i}" for i in range(ITEMS)]
    assert ask(recommender, ["id-3"], exclude_items=everything) == []
    assert ask(recommender, everything) == []
    one = ask(recommender, ["id-3"], exclude_items=everything[:-1])
    assert one == ["id-47"]


@pytest.fixture(scope="module")
def alone(recommender):
    return [recommender.recommend_batch([request])[0] for request in REQUESTS]


def plain(results):
    """Results without the counters of how they were found, among them those of padding in torch."""
    return [(r.recommendations, r.unknown_items, r.certificate) for r in results]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, len(REQUESTS) - 1), min_size=2, max_size=12))
def test_an_answer_has_the_same_bits_alone_and_in_any_batch(recommender, alone, places):
    together = recommender.recommend_batch([REQUESTS[i] for i in places])
    assert plain(together) == plain([alone[i] for i in places])


@pytest.mark.parametrize("exclude_seen", [True, False])
@pytest.mark.parametrize("k", [1, 10, 60])
def test_rank_equals_recommend_batch(recommender, exact, k, exclude_seen):
    catalog = recommender.catalog
    requests = [r.changed(k=k, exclude_seen=exclude_seen, exclude_items=()) for r in REQUESTS]
    histories = [catalog.index(r.history) for r in requests]
    known = Histories.of([h[h >= 0] for h in histories])
    (((items, scores), _),) = rank_histories(recommender, known, k, (exclude_seen,), batch_size=5)
    assert items.shape == scores.shape == (len(requests), k)
    for row, row_scores, result, double in zip(
        items,
        scores,
        recommender.recommend_batch(requests),
        exact.recommend_batch(requests),
        strict=True,
    ):
        n = len(result.recommendations)
        assert [catalog.item_ids[i] for i in row[:n]] == [r.item_id for r in result.recommendations]
        assert_as_exact(row_scores[:n], scores_of(result), scores_of(double))  # other slots
        assert (row[n:] == -1).all()
        assert (row_scores[n:] == -np.inf).all()


def test_warming_up_changes_no_answer(recommender, alone):
    warm_up(recommender)
    assert plain(recommender.recommend_batch(REQUESTS)) == plain(alone)


def test_stored_histories_change_no_bits_and_save_tokens(bundle, alone):
    keeping = Recommender.load(bundle, prefix_bytes=1 << 20)
    for _ in range(2):
        assert plain(keeping.recommend_batch(REQUESTS)) == plain(alone)
    again = keeping.recommend_batch(REQUESTS)
    assert plain(again) == plain(alone)
    assert sum(r.stats["cached_tokens"] for r in again) > 60
    assert all(
        r.stats["target_tokens"] <= a.stats["target_tokens"]
        for r, a in zip(again, alone, strict=True)
    )


def test_boosts_on_a_shared_leaf_remove_the_certificate(recommender):
    """Items 0, 44 and 45 share a leaf: the one with the gain is hidden, the others have a loss."""

    def boost(items, weight):
        return {"filter": {"must": [{"key": "item_id", "any": items}]}, "weight": weight}

    lost = RecommendRequest(
        ["id-3"], 20, exclude_items=["id-44", "id-46", "id-47"],
        boosts=[boost(["id-44"], 50.0), boost(["id-0", "id-45"], -50.0)],
    )  # fmt: skip
    (found,) = recommender.recommend_batch([lost])
    assert found.recommendations[-1].score < -40
    assert found.certificate == "approximate"
    (wide,) = recommender.recommend_batch([lost.changed(k=ITEMS)])  # leaves nothing out
    assert wide.certificate == "global-exact"
    assert wide.recommendations[19].score > found.recommendations[-1].score
    (few,) = recommender.recommend_batch([lost.changed(k=5)])
    assert few.certificate != "approximate"


def test_a_seed_draws_the_same_items_in_any_batch(recommender):
    request = RecommendRequest(["id-3", "id-20"], 5, seed=11, temperature=2.0)
    (first,) = recommender.recommend_batch([request])
    others = [request.changed(seed=seed) for seed in range(20)]
    together = recommender.recommend_batch([*REQUESTS, *others, request])
    assert together[-1] == first
    assert len({tuple(r.item_id for r in x.recommendations) for x in together[-21:]}) > 15
    assert len({r.item_id for r in first.recommendations}) == 5


def test_mode_draft_needs_a_draft_in_the_bundle(bundle):
    with pytest.raises(ArtifactError, match="mode 'draft' needs a draft model"):
        Recommender.load(bundle, mode="draft")


def test_bfloat16_rounds_the_weights(bundle, recommender):
    rough = Recommender.load(bundle, dtype="bfloat16")
    assert rough.engine.target.dtype == torch.bfloat16
    assert rough.engine.target.native is None
    (exact,) = recommender.recommend_batch([RecommendRequest(["id-5", "id-6"], 3)])
    (found,) = rough.recommend_batch([RecommendRequest(["id-5", "id-6"], 3)])
    assert [one.score for one in found.recommendations] != [
        one.score for one in exact.recommendations
    ]
    for near, one in zip(found.recommendations, exact.recommendations, strict=True):
        assert near.item_id == one.item_id
        assert near.score == pytest.approx(one.score, abs=0.5)  # the weights are random and large


def test_a_bundle_is_read_as_it_was_written(bundle):
    loaded = Bundle.load(bundle)
    assert loaded.catalog.items.equals(TABLE)
    assert (loaded.catalog.codes == CODES).all()
    assert loaded.vocabulary == Vocabulary.from_levels(LEVELS)
    assert loaded.prompt == PROMPT
    assert loaded.encoder.max_tokens == 1 + 6 * 3
    assert loaded.target == bundle / "target"
    assert loaded.draft is None
    assert loaded.manifest == read_manifest(bundle)


@pytest.mark.parametrize(
    "name", ["target/model.safetensors", "catalog/items.parquet", "vocabulary.json", PROMPTS]
)
def test_a_damaged_or_missing_file_is_named(copy, name):
    file = copy / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match=f"'{name}' does not match its checksum"):
        Recommender.load(copy)
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ArtifactError, match=f"'{name}' does not match its checksum"):
        Recommender.load(copy)
    file.unlink()
    with pytest.raises(ArtifactError, match=f"'{name}' is missing"):
        Recommender.load(copy)


def pickled(folder):
    torch.save({"w": torch.zeros(1)}, folder / TARGET / "pytorch_model.bin")


def test_a_pickle_in_a_bundle_is_refused_by_name(tmp_path, copy):
    pickled(copy)
    with pytest.raises(ArtifactError, match=r"'target/pytorch_model\.bin' is not in its manifest"):
        Recommender.load(copy)
    with pytest.raises(ArtifactError, match=r"'target/pytorch_model\.bin'.* never loaded"):
        Recommender.load(build(tmp_path / "listed", extra=pickled))


def test_two_items_of_one_id_are_refused_by_the_id(tmp_path):
    table = items_table(["a", "b", "a"])
    with pytest.raises(ArtifactError, match=r"items\.parquet: two items have the id 'a'"):
        Bundle.load(write_bundle(tmp_path / "odd", table, CODES[:3], (4, 3, 3)))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"codes": CODES[:, :2]}, "codes have 2 levels, the vocabulary 3"),
        ({"codes": CODES + 1}, "code 3 at level 3 is outside"),
        ({"prompts": '{"max_items": 3, "block": 4}'}, "want 1 <= block <= max_items"),
        ({"prompts": '{"max_items": 1000000000}'}, "max_items <= 2000, got 8 and 1000000000"),
        ({"prompts": '{"window": 3}'}, "window"),
        ({"prompts": "[]"}, "mapping"),
        ({"prompts": "{"}, "Expecting"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(tmp_path, parts, message):
    with pytest.raises(ArtifactError, match=message):
        Recommender.load(build(tmp_path / "odd", **parts))


def test_closing_frees_stored_prompts_without_collection(bundle):
    def count():
        # isinstance() also asks for `__class__`, which deprecated objects answer with a warning.
        return sum(type(one) is Block for one in gc.get_objects())

    before = count()
    gc.disable()  # as a service does for loaded objects
    try:
        closing = Recommender.load(bundle, prefix_bytes=1 << 20)
        ask(closing, [f"id-{i}" for i in range(6)])
        assert count() > before
        closing.close()
        del closing
        assert count() <= before
    finally:
        gc.enable()


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # other threads are not copied
def test_a_forked_process_gives_the_answers_of_its_parent(bundle, monkeypatch, native):
    """As workers that a server forks after it has loaded the bundle; only a hang ends by time."""
    monkeypatch.setenv(OFF, native)
    threads, large = torch.get_num_threads(), torch.ones(1 << 20, dtype=torch.float64)
    torch.set_num_threads(2)
    try:
        shop, context = Recommender.load(bundle), multiprocessing.get_context("fork")
        expected, total = ask(shop, ["id-3"]), float(large.exp().sum())  # starts a second thread
        receive, send = context.Pipe(duplex=False)

        def answer():
            send.send((ask(shop, ["id-3"]), float(large.exp().sum())))

        child = context.Process(target=answer)
        child.start()
        try:
            assert receive.poll(PATIENCE_S)
            items, its_total = receive.recv()
        finally:
            child.kill()
            child.join()
    finally:
        torch.set_num_threads(threads)
    assert items == expected
    assert its_total == pytest.approx(total)


def test_two_threads_decode_at_once_while_the_catalog_changes(bundle):
    """The second thread searches with `aside`; both give the bits of a search that is alone."""
    recommender, alone = Recommender.load(bundle, prefix_bytes=1 << 20), Recommender.load(bundle)
    large = [r.changed(k=48, trace=True) for r in REQUESTS]
    large += [r.changed(guarantee="global") for r in REQUESTS]
    wanted = [alone.recommend_batch([one])[0].recommendations for one in large]
    usual = [alone.recommend_batch([one])[0].recommendations for one in REQUESTS]
    wrong, ended = [], threading.Event()

    def search_aside():
        for one, expected in zip(large * 3, wanted * 3, strict=True):
            with recommender.aside() as other:
                (found,) = other.recommend_batch([one])
            if found.recommendations != expected:
                wrong.append((one, found))
        ended.set()

    thread = threading.Thread(target=search_aside)
    thread.start()
    rounds = 0
    while not ended.is_set():
        before = recommender.epoch  # an item that is not for sale comes and goes
        recommender.upsert([NewItem("new", "New", attributes={"available": False}, like="id-3")])
        recommender.remove(["new"])
        assert recommender.epoch is not before
        for one, expected in zip(REQUESTS, usual, strict=True):
            (found,) = recommender.recommend_batch([one])
            if found.recommendations != expected:
                wrong.append((one, found))
        rounds += 1
    thread.join()
    assert rounds
    assert not wrong
