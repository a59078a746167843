"""SASRec: what is asked is what was taught, the loss is what it says, and others learn from it."""

import json
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import assert_as_exact, same_list
from safetensors.numpy import save_file

from recsys.artifacts import read_manifest
from recsys.bundle import load_sasrec
from recsys.dataset import Dataset
from recsys.errors import ArtifactError, ConfigError
from recsys.evaluation.run import stage as evaluate_stage
from recsys.interactions import Histories
from recsys.prompts import PromptConfig
from recsys.retrieval import Retrieval, SasRec, digest
from recsys.training import bundle, draft, ids, retrieval, sasrec, target
from recsys.training.batches import TrainingBatches
from recsys.training.loop import clip_gradients, fit, make_optimizer
from recsys.training.sasrec import SampledSoftmax, SasRecModel
from recsys.training.settings import SasRecConfig
from recsys.training.soft_labels import SoftLabels
from recsys.training.state import Checkpoints

ITEMS = 19
SMALL = {
    "epochs": 16,
    "hidden": 16,
    "dropout": 0.0,
    "batch_tokens": 200,
    "warmup_steps": 5,
    "learning_rate": 1e-2,
    "evaluate_every": 2,
    "precision": "float32",
}


def model(seed=0, **options):
    config = SasRecConfig(**{"epochs": 1, "hidden": 16, "window": PromptConfig(12, 4), **options})
    torch.manual_seed(seed)
    made = SasRecModel(ITEMS, config, np.random.default_rng(seed).normal(size=(ITEMS, 5))).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


histories = st.lists(st.lists(st.integers(0, ITEMS - 1), max_size=30), min_size=1, max_size=12)


@settings(max_examples=30, deadline=None)
@given(histories, st.integers(0, 3))
def test_what_is_asked_is_the_model_that_was_taught(asked, seed):
    taught = model(seed)
    frozen, asked = taught.frozen(), Histories.of(asked)
    states, exact = frozen.states(asked), deepcopy(taught).double()
    found, wanted, doubles = [], [], []
    for history, state in zip(asked, states, strict=True):
        kept = history[int(frozen.window.start(len(history))) :]
        if not len(kept):
            assert not state.any()
            continue
        with torch.no_grad():
            vectors = taught.vectors(torch.from_numpy(kept.astype(np.int64)))
            wanted.append(taught(vectors[None])[0, -1].numpy())
            doubles.append(exact(vectors[None].double())[0, -1].numpy())
        found.append(state)
    assert_as_exact(found, wanted, doubles)


@settings(max_examples=30, deadline=None)
@given(histories, st.integers(1, ITEMS + 3))
def test_lists_are_those_of_a_full_sort(asked, k):
    frozen, asked = model().frozen(), Histories.of(asked)
    states = frozen.states(asked)
    logits, exact = (s @ frozen.vectors.astype(s.dtype).T for s in (states, states.astype(float)))
    items, scores = frozen.rank(asked, k, exclude_seen=True)
    for i, history in enumerate(asked):
        order = [j for j in np.argsort(-exact[i], kind="stable") if j not in history][:k]
        order = order if len(history) else []
        assert (items[i, len(order) :] == -1).all()
        mine = list(zip(items[i].tolist(), scores[i].tolist(), strict=True))[: len(order)]
        others = [[(j, row[i, j]) for j in order] for row in (logits, exact)]
        assert not order or same_list(mine, *others)


def test_items_beyond_the_catalog_are_passed_over():
    frozen = model().frozen()
    asked, plain = Histories.of([[3, ITEMS, 4, ITEMS + 7]]), Histories.of([[3, 4]])
    np.testing.assert_array_equal(frozen.states(asked), frozen.states(plain))
    assert (frozen.rank(Histories.of([[ITEMS]]), 3, exclude_seen=True)[0] == -1).all()


def test_a_model_is_stored_in_the_same_bytes_each_time(tmp_path):
    frozen = model().frozen()
    stored = set()
    for _ in range(6):
        frozen.save(tmp_path)
        stored.add((tmp_path / "sasrec.safetensors").read_bytes())
    assert len(stored) == 1
    read = SasRec.load(tmp_path)
    assert (read.heads, read.window) == (frozen.heads, frozen.window)


def test_a_file_of_another_version_is_refused_with_the_command_that_makes_it(tmp_path):
    frozen = model().frozen()
    about = {"heads": frozen.heads, **frozen.window.as_dict()}
    plain = {name: str(value) for name, value in about.items()}
    save_file(dict(frozen.weights), tmp_path / "sasrec.safetensors", plain)
    with pytest.raises(ValueError, match=r"another version of .*`recsys run --name NAME`"):
        SasRec.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"heads": 0}, "0 heads do not divide"),
        ({"heads": float("inf")}, "cannot convert float infinity"),
        ({"items": np.zeros((0, 8), np.float32)}, "of no items"),
        ({"heads": 7}, "7 heads do not divide"),
        ({"max_items": 500}, "500 items are read"),
        ({"norm.weight": np.ones(3, np.float32)}, r"norm\.weight is \(3,\)"),
        ({"layers.0.linear2.weight": np.ones((4, 8), np.float32)}, r"linear2\.weight"),
        ({"layers.0.linear1.weight": np.float32(1)}, r"linear1\.weight"),
        ({"positions": np.float32(1)}, "positions is missing, or no matrix"),
        ({"layers.0.norm1.bias": None}, r"norm1\.bias is missing"),
        ({"norm.bias": np.nan}, r"norm\.bias has values that are not finite"),
    ],
)
def test_a_file_whose_parts_do_not_fit_together_is_refused(tmp_path, changes, reason):
    frozen = model().frozen()
    about = {"heads": frozen.heads, **frozen.window.as_dict()}
    weights = dict(frozen.weights)
    for name, value in changes.items():
        if name in about:
            about[name] = value
        elif value is None:
            del weights[name]
        elif np.shape(value) or np.isfinite(value):
            weights[name] = np.asarray(value)
        else:
            weights[name] = np.full_like(weights[name], value)
    save_file(weights, tmp_path / "sasrec.safetensors", {"about": json.dumps(about)})
    with pytest.raises(ValueError, match=reason):
        SasRec.load(tmp_path)


def loss_of(taught, tokens, soft=None, **options):
    config = SasRecConfig(epochs=1, negatives=ITEMS, **options)
    tokens = torch.tensor(tokens)
    asked = torch.ones_like(tokens, dtype=torch.bool)
    asked[:, 0] = False
    return SampledSoftmax(taught, config, torch.float32)(tokens, asked, *(soft or ()))


def test_with_all_items_as_negatives_it_is_the_whole_softmax():
    taught, rows = model(), [[3, 1, 4], [5, 9, 2]]

    def logits_of(states_of, dtype):
        vectors = taught.vectors(torch.arange(ITEMS)).to(dtype)
        return (states_of(vectors[torch.tensor(rows)[:, :-1]]) @ vectors.T).flatten(0, 1)

    logits = logits_of(taught, torch.float32)
    exact = logits_of(deepcopy(taught).double(), torch.float64)
    target = torch.tensor([1, 4, 9, 2])
    wanted = (torch.nn.functional.cross_entropy(each, target) for each in (logits, exact))
    assert_as_exact(loss_of(taught, rows), *wanted)
    # soft labels: the first event's name its own item and another, the second's say nothing
    soft = (
        torch.tensor([[1, 7], [0, -1], [8, 6], [2, 5]])[..., None],
        torch.tensor([[0.25, 0.75], [0.0, 0.0], [0.5, 0.5], [1.0, 0.0]]),
    )
    shares = torch.zeros(4, ITEMS)
    shares[0, 1], shares[0, 7] = 0.6 + 0.4 * 0.25, 0.4 * 0.75
    shares[1, 4] = 1
    shares[2, 9], shares[2, 8], shares[2, 6] = 0.6, 0.2, 0.2
    shares[3, 2] = 1
    wanted = (-(shares * each.log_softmax(-1)).sum(1).mean() for each in (logits, exact))
    assert_as_exact(loss_of(taught, rows, soft, soft_labels=0.4), *wanted)


def test_a_sample_stands_for_all_items():
    taught, rows = model(), [[3, 1, 4, 8, 0, 12]]
    whole = loss_of(taught, rows).item()
    tokens = torch.tensor(rows)
    asked = torch.ones_like(tokens, dtype=torch.bool)
    asked[:, 0] = False
    module = SampledSoftmax(taught, SasRecConfig(epochs=1, negatives=6), torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        few = np.mean([module(tokens, asked).item() for _ in range(400)])
    assert few == pytest.approx(whole, rel=0.1)


def test_a_run_learns_its_shop_and_goes_on_where_it_was(make_context):
    context = make_context(sasrec=SMALL)
    path = sasrec.stage(context)
    info = read_manifest(path, "sasrec").info
    assert info["validation"]["recall@10"] > 0.7
    dataset = Dataset.load(context.workspace.dataset)
    assert info["fitted_on"] == digest(dataset.train_histories)
    found, key = sasrec.trained(context)
    assert key == read_manifest(path).digest
    items, _ = found.rank(Histories.of([[3, 4, 5]]), 3, exclude_seen=True)
    assert 6 in items[0]
    before = (path / "manifest.json").stat().st_mtime_ns
    assert sasrec.stage(context) == path
    assert (path / "manifest.json").stat().st_mtime_ns == before, "nothing to do"


def test_a_first_event_is_never_asked_whatever_was_dropped(make_context):
    context = make_context(sasrec={**SMALL, "epochs": 2, "item_dropout": 0.6})
    assert read_manifest(sasrec.stage(context)).info["validation"]["recall@10"] > 0


def test_one_of_another_data_set_is_refused(make_context, shop):
    context = make_context(sasrec=SMALL)
    sasrec.stage(context)
    shop.write_parents(context.workspace, dataset=shop.chain_dataset(seed=5))
    with pytest.raises(ArtifactError, match="another dataset"):
        sasrec.trained(context)


def test_ids_and_target_learn_from_it_and_a_report_shows_it(make_context, shop):
    context = make_context(
        sasrec=SMALL,
        ids={"levels": 3, "codebook_size": 4, "features": {"collaborative": "sasrec"}},
        target={"soft_labels": 0.5, "soft_labels_from": "sasrec", "epochs": 2},
        retrieval={"users": 20},
    )
    parts = [stage.stage(context) for stage in (sasrec, ids, target, draft, retrieval)]
    made = read_manifest(parts[0]).digest
    for path in parts[1:3]:
        assert read_manifest(path).parents["sasrec"] == made
    features = np.load(parts[1] / "features.npy")
    blocks = json.loads((parts[1] / "report.json").read_text())["feature_blocks"]
    assert blocks["collaborative"] == SMALL["hidden"]
    assert np.isfinite(features).all()
    known = Retrieval.load(parts[4])
    read = sasrec.features(context, Dataset.load(context.workspace.dataset))
    assert known.vectors.vectors.shape[1] == features.shape[1] + read.shape[1]
    with pytest.raises(ConfigError, match="learned from SASRec"):
        retrieval.stage(make_context())
    path = bundle.stage(context)
    assert read_manifest(path).parents["sasrec"] == made
    assert read_manifest(path).info["sasrec_fitted_on"] == read_manifest(parts[0]).info["fitted_on"]
    report = json.loads((evaluate_stage(context) / "report.json").read_text())
    assert "SASRec" in json.dumps(report)
    with pytest.raises(ArtifactError, match=f"of {shop.ITEMS} items"):
        load_sasrec(path, shop.ITEMS - 1)
    damaged = path / "eval" / "sasrec.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:50])
    with pytest.raises(ArtifactError, match=r"sasrec\.safetensors"):
        load_sasrec(path, shop.ITEMS)


def test_soft_labels_are_its_likeliest_unseen_items():
    frozen, trained = model().frozen(), Histories.of([[3, 1, 4], [5], [2, 6]])
    labels = SoftLabels.of_sasrec(frozen, trained, k=4)
    for event, before in ((1, [3]), (2, [3, 1]), (5, [2])):
        items, scores = frozen.rank(Histories.of([before]), 4, exclude_seen=True)
        np.testing.assert_array_equal(labels.items[event], items[0])
        shares = np.exp(scores[0] - scores[0].max())
        np.testing.assert_allclose(labels.shares[event], shares / shares.sum(), rtol=1e-5)
    for first in (0, 3, 4):
        assert not labels.shares[first].any(), "nothing stands before it"


@pytest.mark.parametrize("minutes", [None, 0.0, 5.0])
def test_labels_of_chosen_events_and_within_a_time_limit_are_those_of_all_or_none(minutes):
    teacher, chosen = model().frozen(), np.arange(0, 100, 2)
    histories = Histories.of([np.arange(i % 7) for i in range(40)])
    whole = SoftLabels.of_sasrec(teacher, histories, 4)
    some = SoftLabels.of_sasrec(teacher, histories, 4, minutes, chosen)
    labelled, may_be = some.shares.any(axis=1), np.isin(np.arange(len(some.shares)), chosen)
    np.testing.assert_array_equal(labelled, whole.shares.any(axis=1) & may_be & (minutes != 0))
    np.testing.assert_array_equal(some.items[labelled], whole.items[labelled])
    np.testing.assert_allclose(some.shares[labelled], whole.shares[labelled], rtol=1e-5)


def test_vectors_of_a_large_catalogue_are_made_a_part_at_a_time(monkeypatch):
    whole = model().frozen().vectors
    monkeypatch.setattr("recsys.training.sasrec.ITEMS_AT_A_TIME", 7)
    np.testing.assert_allclose(model().frozen().vectors, whole, rtol=1e-6)


@pytest.fixture
def clustered():
    """A model of 2,000 items whose vectors lie around 40 centres, as those of a shop do."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(40, 16))
    vectors = centres[rng.integers(0, 40, 2000)] + 0.3 * rng.normal(size=(2000, 16))
    vectors *= 2 / np.linalg.norm(vectors, axis=1, keepdims=True)
    config = SasRecConfig(epochs=1, hidden=16, window=PromptConfig(5, 2))
    torch.manual_seed(0)
    frozen = SasRecModel(2000, config, None).frozen()
    weights = {**frozen.weights, "items": vectors.astype(np.float32)}
    return replace(frozen, weights=weights)


@pytest.mark.parametrize(("probed", "least"), [(10_000, 1.0), (16, 0.9)])
def test_labels_from_an_inverted_file_are_nearly_those_of_all_products(
    clustered, monkeypatch, probed, least
):
    rng = np.random.default_rng(1)
    histories = Histories.of([rng.integers(0, 2000, rng.integers(1, 9)) for _ in range(200)])
    exact = SoftLabels.of_sasrec(clustered, histories, 8)
    monkeypatch.setattr("recsys.training.soft_labels.LARGE", 2000)
    monkeypatch.setattr("recsys.training.soft_labels.PROBED", probed)
    fast = SoftLabels.of_sasrec(clustered, histories, 8)
    labelled = exact.shares.any(axis=1)
    np.testing.assert_array_equal(fast.shares.any(axis=1), labelled)
    common = [
        np.isin(a, b).mean()
        for a, b in zip(fast.items[labelled], exact.items[labelled], strict=True)
    ]
    assert np.mean(common) >= least
    if least == 1:
        np.testing.assert_allclose(fast.shares, exact.shares, atol=1e-5)


def test_steps_on_a_large_catalogue_change_the_rows_of_their_batches_alone(monkeypatch):
    """They are those of Adam on these rows, written out here; the loss has the same gradient."""
    monkeypatch.setattr("recsys.training.sasrec.LARGE", ITEMS)
    monkeypatch.setattr(SampledSoftmax, "_sample", lambda *_: torch.tensor([0, 5]))
    taught = model()
    assert taught.items.sparse
    config = SasRecConfig(epochs=1, negatives=2, learning_rate=0.1, dropout=0.0)
    module = SampledSoftmax(taught, config, torch.float32)
    optimizer = make_optimizer(module, config)
    mean, square = torch.zeros_like(taught.items.weight), torch.zeros_like(taught.items.weight)
    for step, row in enumerate(([3, 1, 4], [3, 2, 6]), start=1):
        tokens, asked = torch.tensor([row]), torch.tensor([[False, True, True]])
        before = taught.items.weight.detach().clone()
        module(tokens, asked).backward()
        norm = sum((p.grad.to_dense() ** 2).sum() for p in module.parameters()).sqrt()
        clip_gradients(module)
        gradient = taught.items.weight.grad.to_dense()
        rest = sum((p.grad.to_dense() ** 2).sum() for p in module.parameters()).sqrt()
        assert rest.item() == pytest.approx(min(norm.item(), 1.0), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
        used = sorted({*row, 0, 5})
        mean[used] = 0.9 * mean[used] + 0.1 * gradient[used]
        square[used] = 0.98 * square[used] + 0.02 * gradient[used] ** 2
        rate = 0.1 * (1 - 0.98**step) ** 0.5 / (1 - 0.9**step)
        expected = before.clone()
        expected[used] -= rate * mean[used] / (square[used].sqrt() + 1e-8)
        torch.testing.assert_close(taught.items.weight.detach(), expected)


def test_a_run_on_a_large_catalogue_that_was_stopped_ends_with_the_same_bits(monkeypatch, tmp_path):
    monkeypatch.setattr("recsys.training.sasrec.LARGE", ITEMS)
    config = SasRecConfig(
        epochs=3, evaluate_every=0, checkpoint_minutes=0, batch_tokens=30, negatives=5, hidden=16,
        precision="float32",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    histories = Histories.of([rng.integers(0, ITEMS, 6) for _ in range(20)])
    batches = TrainingBatches.of(
        histories, config.window, np.arange(ITEMS)[:, None], prefix=(), pad=0, max_tokens=30
    )

    def stopping(epoch, start=0):
        for number, batch in enumerate(batches.epoch(epoch, start)):
            if (epoch, number) == (1, 2):
                raise KeyboardInterrupt
            yield batch

    def train(folder, epoch):
        module = SampledSoftmax(model(), config, torch.float32).train()
        data = SimpleNamespace(count=batches.count, epoch=epoch)
        fit(module, data, config, Checkpoints(folder, {}), name="sasrec")
        return module.model.items.weight.detach()

    straight = train(tmp_path / "straight", batches.epoch)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", stopping)
    assert torch.equal(train(tmp_path / "stopped", batches.epoch), straight)


def test_a_large_catalogue_has_different_negatives_all_equally_likely(monkeypatch):
    monkeypatch.setattr("recsys.training.sasrec.LARGE", ITEMS)
    module = SampledSoftmax(model(), SasRecConfig(epochs=1, negatives=4), torch.float32)
    torch.manual_seed(0)
    draws = [module._sample(ITEMS, torch.device("cpu")) for _ in range(2000)]
    assert all(len(draw.unique()) == len(draw) for draw in draws)
    counts = torch.bincount(torch.cat(draws), minlength=ITEMS) / 2000
    assert (counts.max() - counts.min()) < 0.06
