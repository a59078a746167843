"""The decoding benchmark counts what it says, and times nothing but beam search's answers."""

import json
from dataclasses import replace

import decode
import numpy as np
import pyarrow as pa
import pytest
import torch
import workload
from answers import Agreement
from decode import Options, measure
from huggingface import allowed_tokens, huggingface_beam_search
from numpy.testing import assert_array_equal
from oracles import tiny_model

from recsys.artifacts import write_artifact
from recsys.bundle import CATALOG, DRAFT, KIND, PROMPTS, TARGET
from recsys.catalog import Catalog
from recsys.dataset import Dataset
from recsys.decoding import speculative_beam_search
from recsys.errors import ArtifactError, ConfigError, RecsysError
from recsys.interactions import Interactions
from recsys.models.architecture import Architecture
from recsys.models.checkpoint import save_model
from recsys.models.tree_forward import TreeModel
from recsys.splits import TEST, TRAIN
from recsys.vocabulary import Vocabulary

VOCABULARY = Vocabulary.from_levels([16] * 4)
SETUP = workload.Setup(6, "cpu", torch.float32, 0)
SMALL = Architecture(64, 64, 1, 2)


def small_workload(dtype=torch.float32, draft=SMALL):
    setup = replace(SETUP, dtype=dtype)
    return workload.make_random_workload((SMALL, draft), VOCABULARY, setup, items=400, history=5)


OPTIONS = Options(beams=(3,), batches=(2, 8), nodes=(20,), repeats=1, hf_repeats=1)


@pytest.fixture(scope="module")
def result():
    return measure(small_workload(), OPTIONS)


def row(result, **wanted):
    found = [r for r in result if all(r[k] == v for k, v in wanted.items())]
    assert len(found) == 1, wanted
    return found[0]


def test_every_cell_has_every_mode(result):
    modes = ["beam", "exhaustive", "draft-20", "planned"]
    assert len(result) == 2 * (4 + 5)
    for reuse in ("cold", "warm"):
        assert [r["mode"] for r in result if (r["reuse"], r["batch"]) == (reuse, 2)] == modes
        row(result, reuse=reuse, batch=8, mode="huggingface")


def test_small_batches_get_more_rounds(result):
    assert row(result, reuse="cold", batch=2, mode="beam")["rounds"] == 4
    assert row(result, reuse="cold", batch=8, mode="beam")["rounds"] == 1


def test_passes_and_tokens_are_those_of_the_search(result):
    beams = row(result, reuse="cold", batch=8, mode="beam")
    assert (beams["passes"], beams["target_tokens"]) == (4, 21 + 3 * 3)
    assert row(result, reuse="cold", batch=8, mode="exhaustive")["passes"] == 2


def test_warm_prompts_run_only_their_new_item(result):
    # 4 items were known: 1 + 16 tokens, of which 16 lie in whole blocks
    cold, warm = (row(result, reuse=r, batch=8, mode="beam") for r in ("cold", "warm"))
    assert cold["target_tokens"] - warm["target_tokens"] == 16
    assert cold["kv_bytes"] == warm["kv_bytes"]


def test_memory_is_compared_with_one_beam_and_generate(result):
    per_slot = 2 * 1 * 64 * 4
    beams = row(result, reuse="cold", batch=8, mode="beam")
    assert (beams["kv_slots"], beams["kv_bytes"]) == (30, per_slot * 30)
    assert row(result, reuse="cold", batch=8, mode="beam")["kv_to_greedy"] == 30 / 24 + 0.0
    theirs = row(result, reuse="cold", batch=8, mode="huggingface")
    assert theirs["kv_bytes"] == per_slot * 3 * 24


def test_generate_keeps_the_slots_counted_for_it(monkeypatch):
    data = small_workload()
    model, kept = data.target, []
    plain = model.generate

    def generate(*args, **options):
        output = plain(*args, **options)
        kept.append(
            sum(layer.keys.nbytes + layer.values.nbytes for layer in output.past_key_values.layers)
        )
        return output

    monkeypatch.setattr(model, "generate", generate)
    huggingface_beam_search(model, data.prompts[:2], allowed_tokens(data.item_tokens), 3)
    assert kept == [2 * 3 * (21 + 3) * 2 * 64 * 4]


def test_answers_agree_and_ratios_have_two_sides(result):
    for r in result:
        assert r["agreement"]["requests"] == 1
        assert (r["ws_huggingface"] is None) == (r["batch"] == 2)
    assert row(result, reuse="cold", batch=8, mode="beam")["ws_beam"]["p50"] == 1


def test_the_planner_reports_its_plans(result):
    planned = row(result, reuse="warm", batch=2, mode="planned")
    assert sum(planned["plans"].values()) == planned["rounds"]


def test_a_perfect_draft_takes_one_pass():
    options = replace(OPTIONS, batches=(2,), nodes=(40,), modes=("perfect",), hf_repeats=0)
    found = measure(small_workload(), options)
    for reuse in ("cold", "warm"):
        perfect = row(found, reuse=reuse, mode="perfect-40")
        assert (perfect["passes"], perfect["accepted_levels"]) == (1, 3)
        assert perfect["agreement"]["requests"] == 1


def test_a_wrong_answer_stops_the_benchmark(monkeypatch):
    def lies(target, drafter, prompts, trie, beams, **options):
        found = speculative_beam_search(target, drafter, prompts, trie, beams, **options)
        return replace(found, rows=found.rows.flip(1), tokens=found.tokens.flip(1))

    monkeypatch.setattr(decode, "speculative_beam_search", lies)
    options = replace(OPTIONS, modes=("exhaustive",), reuse=("cold",), hf_repeats=0)
    with pytest.raises(RecsysError, match="exhaustive at K = 3, B = 2, cold"):
        measure(small_workload(), options)


def test_bfloat16_rows_report_their_agreement():
    options = replace(OPTIONS, batches=(8,), modes=("exhaustive",), reuse=("cold",))
    found = measure(small_workload(torch.bfloat16, draft=None), options)
    assert [r["mode"] for r in found] == ["beam", "huggingface", "exhaustive"]
    assert all(0 < r["agreement"]["items"] <= 1 for r in found)


def test_agreement_counts_lists_items_and_the_gap():
    expected = [[((1,), -1.0), ((2,), -2.0)], [((3,), -1.0), ((4,), -2.0)]]
    found = [[((1,), -1.0), ((2,), -2.00001)], [((3,), -1.25), ((5,), -2.0)]]
    agreement = Agreement.of(found, expected, tolerance=1e-4, tie=1e-5)
    assert (agreement.requests, agreement.items, agreement.gap) == (0.5, 0.75, 0.25)
    other = Agreement(1.0, 1.0, 0.5)
    assert Agreement.join([agreement, other]) == Agreement(0.75, 0.875, 0.5)


def test_random_codes_are_distinct_and_skewed():
    codes = workload.draw_skewed_codes(np.random.default_rng(0), 5_000, (256,) * 4)
    assert codes.shape == (5_000, 4)
    assert len(np.unique(codes, axis=0)) == 5_000
    counts = np.sort(np.bincount(codes[:, 0], minlength=256))[::-1]
    assert counts[:64].sum() > 0.4 * 5_000, "an even draw gives a quarter"
    assert codes.min() >= 0
    assert codes.max() < 256


def test_a_catalog_has_room():
    with pytest.raises(ConfigError, match="--items 9: want 1 to 8"):
        workload.draw_skewed_codes(np.random.default_rng(0), 9, (4, 4))
    assert len(workload.draw_skewed_codes(np.random.default_rng(0), 8, (4, 4))) == 8


def test_a_random_model_depends_on_its_setup_alone():
    models = [
        workload.make_random_model(SMALL, VOCABULARY, replace(SETUP, dtype=torch.bfloat16, seed=s))
        for s in (1, 1, 2)
    ]
    heads = [m.get_output_embeddings().weight for m in models]
    assert heads[0].dtype == torch.bfloat16
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert torch.get_default_dtype() == torch.float32


def test_rounds_cover_all_users_in_turn():
    data = small_workload()
    assert [data.group(r, 4) for r in range(3)] == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]
    for now, earlier in zip(data.prompts, data.earlier, strict=True):
        assert_array_equal(now[: len(earlier)], earlier)
        assert len(now) - len(earlier) == 4


ITEMS = 12
IDS = [f"i{n:02d}" for n in range(ITEMS)]
TABLE = pa.table({"item_id": IDS, "title": IDS, "text": [""] * ITEMS})


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A bundle with a draft, and its data set of two users, of whom one can be asked."""
    folder = tmp_path_factory.mktemp("home")
    vocabulary = Vocabulary.from_levels((4, 3))
    codes = np.stack(np.unravel_index(np.arange(ITEMS), (4, 3)), axis=1).astype(np.int32)
    with write_artifact(folder / "bundles" / "shop", KIND) as inside:
        for part in (TARGET, DRAFT):
            save_model(tiny_model(vocabulary=vocabulary.size), inside / part)
        (inside / CATALOG).mkdir()
        Catalog(TABLE, codes).save(inside / CATALOG)
        vocabulary.save(inside)
        (inside / PROMPTS).write_text(json.dumps({"max_items": 4, "block": 1}))
    user = ["a"] * 4 + ["b"] * 2
    item = [IDS[n] for n in (0, 1, 2, 3, 4, 5)]
    events = Interactions.of(user, item, [1, 2, 3, 4, 1, 2], item_ids=IDS)
    split = np.asarray([TRAIN, TRAIN, TRAIN, TEST, TRAIN, TEST], np.uint8)
    with write_artifact(folder / "datasets" / "shop", "dataset") as inside:
        Dataset(events, split, TABLE).save(inside)
    return folder


def test_a_bundle_gets_the_test_users_of_its_data_set(home, monkeypatch):
    monkeypatch.setenv("RECSYS_HOME", str(home))
    data = workload.load_bundle_workload(home / "bundles/shop", SETUP)
    assert data.facts["prompts"] == "test users"
    # items 0, 1, 2 have codes (0, 0), (0, 1), (0, 2); level 2 starts at token 6
    assert [p.tolist() for p in data.prompts] == [[1, 2, 6, 2, 7, 2, 8]]
    assert [p.tolist() for p in data.earlier] == [[1, 2, 6, 2, 7]]
    assert TreeModel.of(data.draft).vocabulary_size == 16


def test_a_bundle_without_its_data_set_is_refused(home, monkeypatch, tmp_path):
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path))
    with pytest.raises(ArtifactError, match="shop"):
        workload.load_bundle_workload(home / "bundles/shop", SETUP)
