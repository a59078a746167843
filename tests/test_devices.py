"""Each stage and each way of decoding on a claimed GPU, where no tensors of two devices may meet.

What is decoded there equals what is decoded on the CPU.
"""

import copy
import json
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from decodes import DRAFT, PROMPTS, REQUESTS, ROWS, SEARCHES, TARGET, TRIE, assert_same
from oracles import byte_level_tokenizer, tiny_model
from starlette.testclient import TestClient
from toy_bundle import wait_until_ready

from recsys import devices, loading
from recsys.config import Settings
from recsys.decoding import ModelDrafter, score_rows
from recsys.decoding.captures import Captures
from recsys.devices import faster_device
from recsys.evaluation import gate
from recsys.evaluation.protocol import EvaluationConfig
from recsys.evaluation.rankings import rank_histories
from recsys.evaluation.run import _load
from recsys.interactions import Histories
from recsys.models.tree_forward import TreeModel
from recsys.pipeline import STAGES, Context, load_stage
from recsys.prompts import PromptConfig
from recsys.recommender import Recommender, RecommendRequest
from recsys.serving.app import create_app
from recsys.serving.settings import ServingSettings
from recsys.text.beam import BeamSettings, generate_text
from recsys.text.sample import sample_text
from recsys.text.titles import Titles, generate_titles
from recsys.text.tokenizer import TextTokenizer
from recsys.training import device as training_device
from recsys.training import recipe, teacher
from recsys.training.batches import TrainingBatches
from recsys.training.loop import fit
from recsys.training.objective import NextToken
from recsys.training.settings import LoopConfig
from recsys.training.state import Checkpoints
from recsys.training.supervised import describe
from recsys.training.validation import Validation
from recsys.warm_up import warm_up

SMALL = {
    "name": "road",
    "data": {"source": "synthetic", "synthetic": {"users": 120, "items": 240}},
    "sasrec": {"epochs": 1, "hidden": 16, "evaluate_every": 1, "eval_users": 20},
    "recipe": {"trials": {"smoother": ["target.label_smoothing=0.2"]}, "users": 60},
    "ids": {
        "levels": 3, "codebook_size": [12, 8, 4], "features": {"collaborative": "sasrec"},
        "rqvae": {"passes": 1, "steps": 20},
    },
    "target": {
        "architecture": {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 1},
        "epochs": 2, "evaluate_every": 1, "eval_users": 20, "precision": "float32",
        "soft_labels": 0.5, "embedding_dropout": 0.1, "prompt": {"max_items": 8, "block": 2},
    },
    "draft": {
        "objective": "sft", "epochs": 1, "evaluate_every": 1, "eval_users": 10,
        "accept_users": 10, "precision": "float32",
    },
    "teacher": {"histories": 40, "beams": 4},
    "evaluate": {"ks": [1, 10], "resamples": 10, "users": 20},
    "gate": {"users": 20, "resamples": 10},
}  # fmt: skip
TRAINED = ("sasrec", "target", "draft")
OTHERS = {"teacher": teacher.stage, "gate": gate.stage}  # stages that others or commands run
ON_GPU = (*TRAINED, *OTHERS, "recipe", "retrieval", "evaluate")


def context(*, force=False, **sections):
    """The run with other settings in some sections."""
    changed = {name: {**SMALL.get(name, {}), **values} for name, values in sections.items()}
    return Context.of(Settings({**SMALL, **changed}), force=force)


def run_stage(memory, run, name):
    """Run a stage; whether it was on the GPU, and no measurement there has raised."""
    before = memory.operations
    with mock.patch.object(devices.logger, "warning", wraps=devices.logger.warning) as not_used:
        run.run(OTHERS.get(name) or load_stage(name))
    if name in TRAINED and run.workspace.manifest(name).info["device"] != "cuda":
        return False
    return memory.operations > before and not not_used.called


@pytest.fixture(scope="module")
def road(built_once, claimed_gpu):
    """The workspace of a run on a GPU, which stages were there, and devices of its trials."""

    def run_road(home):
        def validate(model, *args):
            trials.append(model.device.type)
            return Validation.of(model, *args)

        trials = []
        with pytest.MonkeyPatch.context() as patch, claimed_gpu() as memory:
            patch.setenv("RECSYS_HOME", str(home))
            patch.setattr(recipe, "Validation", SimpleNamespace(of=validate))
            stages = {name: run_stage(memory, context().with_recipe(), name) for name in STAGES}
        (home / "seen.json").write_text(json.dumps([stages, trials]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recsys.devices.faster_device", lambda *_, **__: "cuda")
        patch.setattr(devices, "WARM_UP", 0)  # the device is chosen before it is measured
        patch.setattr(devices, "ROUNDS", 1)
        home = built_once("road", run_road)
        patch.setenv("RECSYS_HOME", str(home))
        yield context().workspace, *json.loads((home / "seen.json").read_text())


def test_every_stage_runs_and_those_of_models_on_the_gpu(road):
    workspace, stages, trials = road
    assert (workspace.bundle / "manifest.json").is_file()
    assert {name for name, on_gpu in stages.items() if on_gpu} >= {*STAGES} & {*ON_GPU}
    assert trials == ["cuda"] * 2
    report = json.loads((workspace.report / "report.json").read_text(encoding="utf-8"))
    assert report["protocol"]["device"] == "cuda"


OBJECTIVES = {
    "words": {"objective": "wordkd"},
    "levels": {"objective": "atspeed-s"},
    "whole vocabulary": {"objective": "seqkd", "ablations": ["unconstrained", "top-1"]},
    "margins": {"objective": "margin-kd"},
    "another shape": {"init_from_target": False, "architecture": {"hidden_size": 16, "heads": 1}},
}


@pytest.fixture
def home(road, monkeypatch):
    monkeypatch.setenv("RECSYS_HOME", str(road[0].home))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_draft_learns_by_every_objective(home, claimed_gpu, objective):
    run = context(draft=OBJECTIVES[objective], force=True)
    with claimed_gpu() as memory:
        assert run_stage(memory, run, "draft")


def test_a_run_continues_the_bundle_of_its_parent(home, road, claimed_gpu, monkeypatch):
    def evaluate(rankers, *args):
        compared.extend(ranker.recommender.device.type for ranker in rankers.values())
        return evaluate_alike(rankers, *args)

    compared, evaluate_alike = [], gate.evaluate_alike
    monkeypatch.setattr(gate, "evaluate_alike", evaluate)
    target = {**SMALL["target"], "update": "lora", "agreement": 0.2, "soft_labels_from": "sasrec"}
    values = {**SMALL, "target": target, "name": "newer", "parent": "road"}
    del values["data"], values["recipe"]
    run = Context.of(Settings(values))
    shutil.copytree(road[0].dataset, run.workspace.dataset)
    with claimed_gpu() as memory:
        for name in ("sasrec", "ids", "target", "draft", "retrieval", "bundle", "gate"):
            assert run_stage(memory, run, name) or name not in ON_GPU, name
    assert set(compared) == {"cuda"}


class Stopped(Exception):  # noqa: N818 - it is no error here
    """Stands for a crash."""


class Batches:
    """Batches of training, which end in a crash when one of a number is asked for."""

    def __init__(self, crash=None):
        histories = Histories.of([list(range(first, first + 6)) for first in range(12)])
        self.crash, self.batches = crash, TrainingBatches.of(
            histories, PromptConfig(8, 4), TRIE.rows.astype(np.int64),
            prefix=(1,), pad=0, max_tokens=60,
        )  # fmt: skip
        self.count = self.batches.count

    def epoch(self, epoch, start=0):
        for number, batch in enumerate(self.batches.epoch(epoch, start)):
            if number == self.crash:
                raise Stopped
            yield batch


def test_a_training_that_stopped_continues_to_the_same_weights(claimed_gpu, tmp_path):
    config = LoopConfig(
        epochs=2, warmup_steps=1, evaluate_every=0, checkpoint_minutes=0, precision="float32"
    )

    def train(folder, seed, crash=None):
        module = NextToken(tiny_model("llama", seed=seed))
        found = fit(module, Batches(crash), config, Checkpoints(tmp_path / folder, {}), name="toy")
        assert describe(found, 0, module)["device"] == "cuda"
        return [parameter.detach().cpu() for parameter in module.parameters()]

    with claimed_gpu() as memory:
        expected = train("straight", 0)
        assert memory.operations
        with pytest.raises(Stopped):
            train("stopped", 0, crash=2)
        assert (tmp_path / "stopped" / "step-2").is_dir()
        found = train("stopped", 9)
    torch.testing.assert_close(found, expected)


# Training: the device where a step takes less time.


def weights_after(folder):
    """The device that training takes, and the weights at the end."""
    config = LoopConfig(epochs=1, evaluate_every=0, checkpoint_minutes=0, precision="float32")
    torch.manual_seed(0)
    batches, models = Batches(), [tiny_model("llama", seed=0)]

    def make(device, model):
        return NextToken(model, dropout=0.3)

    module, device = training_device.on_chosen_device("toy", models, make, batches, config)
    fit(module, batches, config, Checkpoints(folder, {}), name="toy", device=device)
    return device.type, [parameter.detach().cpu() for parameter in module.parameters()]


@pytest.mark.parametrize(("cpu_s", "gpu_s", "chosen"), [(0.08, 0.02, "cuda"), (0.01, 0.02, "cpu")])
def test_training_takes_the_device_of_the_shorter_steps(
    claimed_gpu, monkeypatch, tmp_path, capsys, cpu_s, gpu_s, chosen
):
    _, expected = weights_after(tmp_path / "without a GPU")
    losses, scripted = [], [cpu_s, gpu_s]

    def scripted_seconds(run, limit_s):
        losses.append(run())
        return scripted.pop(0)

    monkeypatch.setattr(training_device, "typical_seconds", scripted_seconds)
    monkeypatch.setattr("recsys.devices.faster_device", faster_device)  # not that of `road`
    with claimed_gpu():
        device, weights = weights_after(tmp_path / "with a GPU")
    assert device == chosen
    assert losses[0] == pytest.approx(losses[1])
    # Measured steps are no part of the training, whose dropout is what it was.
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    shown = " ".join(capsys.readouterr().err.split())
    assert f"a step takes {1e3 * cpu_s:.1f} ms on cpu, {1e3 * gpu_s:.1f} ms on cuda" in shown
    assert f"toy: on {chosen}" in shown


def test_training_falls_back_to_the_cpu_if_a_step_on_the_gpu_raises(
    claimed_gpu, monkeypatch, tmp_path, caplog
):
    right = training_device.step_seconds

    def broken(module, batches, config, device):
        if device.type == "cuda":
            raise RuntimeError("CUDA error: no kernel image")
        return right(module, batches, config, device)

    monkeypatch.setattr(training_device, "step_seconds", broken)
    with claimed_gpu():
        assert weights_after(tmp_path)[0] == "cpu"
    assert "no kernel image" in caplog.text
    assert "ACCELERATE_USE_CPU=no" in caplog.text


@pytest.mark.parametrize("case", ["launched", "large"])
def test_training_does_not_measure_where_the_device_is_clear(
    claimed_gpu, monkeypatch, tmp_path, case
):
    monkeypatch.setattr(training_device, "step_seconds", lambda *_: pytest.fail("it is measured"))
    if case == "launched":
        monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    else:
        monkeypatch.setattr(training_device, "LARGE_STEP", 1)
    with claimed_gpu():
        assert weights_after(tmp_path)[0] == "cuda"


# Decoding: the same values as on the CPU.

SEARCHED = [(search, r) for search in SEARCHES for r in ("plain", "all") if search != "relaxed"]
SEARCHED += [(search, "sampled") for search in ("beam", "exhaustive", "draft", "relaxed")]


def on_gpu(model):
    return copy.deepcopy(model).to("cuda")


@pytest.mark.parametrize(("search", "request_"), SEARCHED, ids=["-".join(s) for s in SEARCHED])
def test_a_search_finds_there_what_it_finds_on_the_cpu(claimed_gpu, search, request_):
    request = REQUESTS[request_]
    expected = SEARCHES[search](TARGET, ModelDrafter(DRAFT, 20), request)
    with claimed_gpu():
        target, draft = (TreeModel(on_gpu(model)) for model in (TARGET, DRAFT))
        for kept in (False, True, True):
            if kept and target.prefixes is None:
                target.keep_prefixes(1 << 20)
                draft.keep_prefixes(1 << 20)
            found = SEARCHES[search](target, ModelDrafter(draft, 20), request)
            assert_same(found, expected, atol=1e-10, rtol=0)


def test_scores_of_rows(claimed_gpu):
    expected = score_rows(TARGET, PROMPTS, TRIE, ROWS)
    with claimed_gpu():
        found = score_rows(on_gpu(TARGET), PROMPTS, TRIE, ROWS)
        torch.testing.assert_close(found.cpu(), expected, atol=1e-10, rtol=0)


TITLES = ["Heat", "Alien", "Toy Story", "Up"]
TOKENIZER = byte_level_tokenizer([*TITLES, "because it is much like the others"], 330)
WRITER = tiny_model("llama-gqa", 352, dtype=torch.float64)


def write(model):
    """Texts and titles as plain values."""
    prompts = [np.array([5, 6, 7]), np.array([9, 9])]
    titles = Titles(TITLES, TextTokenizer(TOKENIZER, 352))
    beams = generate_text(model, prompts, BeamSettings(3, 6, num_return_sequences=2))
    return [
        beams.tokens.tolist(),
        [[row.tolist() for row in rows] for rows in generate_titles(model, prompts, titles).items],
        [text.tokens for text in sample_text(model, prompts, titles.constraint(), 8)],
    ]


def test_texts_are_those_of_the_cpu(claimed_gpu):
    expected = write(WRITER)
    with claimed_gpu():
        assert write(on_gpu(WRITER)) == expected


# A recommender: its answers are those of a recommender on the CPU.


def requests(recommender):
    """Lists of requests, each of another kind."""
    ids, brand = recommender.catalog.item_ids, {"must": [{"key": "brand", "match": BRAND}]}
    ask = partial(RecommendRequest, ids[3:9], 5)
    return [
        [ask(), RecommendRequest(ids[40:44], 12)],
        [ask(filter=brand, blend=False), ask(exclude_items=ids[20:30])],
        [ask(boosts=[{"filter": brand, "weight": 2.0}]), ask(pin=ids[50:52])],
        [ask(guarantee="global")],
        [ask(mode="strict"), ask(trace=True)],
        [ask(seed=3)],
        [ask(seed=3, mode="relaxed")],
        [ask(max_per={"brand": 1})],
        [RecommendRequest([], 5)],
    ]


BRAND = "Saffron House"


def answers(recommender):
    """Items and scores of all kinds of requests, before and after items change."""
    ids, found = recommender.catalog.item_ids, []
    for _ in range(2):  # the second time, what was kept of the prompts is read
        for group in requests(recommender):
            for result in recommender.recommend_batch(group):
                found += [(one.item_id, one.score) for one in result.recommendations]
    new = replace(recommender.epoch.item(ids[5]), item_id="new", semantic_id=None)
    recommender.upsert([new])
    found += [(one.item_id, one.score) for one in recommender.recommend([ids[4:8]], k=20)[0]]
    recommender.remove(["new"])
    found += [(one.item_id, one.score) for one in recommender.recommend([ids[4:8]], k=20)[0]]
    found += zip(ids[5:9], recommender.score([ids[:3]], [ids[5:9]])[0], strict=True)
    histories = Histories.of([list(range(first, first + 5)) for first in range(6)])
    for lists in rank_histories(recommender, histories, 5, (True, False)):
        for items, scores in lists:
            found += zip(items.ravel().tolist(), scores.ravel().tolist(), strict=True)
    return found


@pytest.mark.parametrize(
    ("mode", "capture"), [("beam", "decodes"), ("draft", "passes"), ("exhaustive", "passes")]
)
def test_a_recommender_gives_the_answers_of_the_cpu(road, claimed_gpu, mode, capture):
    bundle, options = road[0].bundle, {"dtype": "float64", "mode": mode, "max_batch": 1}
    expected = answers(Recommender.load(bundle, **options))
    with claimed_gpu() as memory:
        found = Recommender.load(
            bundle, device="cuda", capture=capture, prefix_bytes=1 << 20, **options
        )
        warm_up(found)
        before = memory.operations
        mine = answers(found)
        assert memory.operations > before
        found.close()
    assert [item for item, _ in mine] == [item for item, _ in expected]
    assert [score for _, score in mine] == pytest.approx([score for _, score in expected])


@pytest.fixture
def slow_gpu(monkeypatch):
    """On a GPU that is slower than the CPU, work that lost the name of its device is noticed."""
    monkeypatch.setattr("recsys.devices.faster_device", lambda **times: "cpu")


def test_a_service_answers_from_its_threads(road, claimed_gpu, slow_gpu, tmp_path):
    recommender = Recommender.load(road[0].bundle)
    history = recommender.catalog.item_ids[:4]
    expected = [item.item_id for item in recommender.recommend([history], k=5)[0]]
    settings = ServingSettings(
        bundle=road[0].bundle, histories=None, store=tmp_path / "histories.db", device="cuda",
        capture="passes", max_batch=1, mode="beam",
    )  # fmt: skip
    with (
        claimed_gpu() as memory,
        TestClient(create_app(settings), base_url="http://localhost") as client,
    ):
        wait_until_ready(client)
        before = memory.operations
        answer = client.post("/v1/recommendations", json={"history": history, "k": 5})
        assert answer.status_code == 200, answer.text
        assert memory.operations > before
    assert [item["item_id"] for item in answer.json()["items"]] == expected


def test_a_service_whose_captures_do_not_fit_answers_from_the_cpu(
    road, claimed_gpu, monkeypatch, tmp_path, caplog
):
    right = Captures.capture_decodes

    def full(self, *arguments, **options):
        if self._target.device.type == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(self, *arguments, **options)

    monkeypatch.setattr(Captures, "capture_decodes", full)
    monkeypatch.setattr(devices, "LARGE_BYTES", 1)  # so nothing is measured
    settings = ServingSettings(
        bundle=road[0].bundle, histories=None, store=tmp_path / "histories.db",
        capture="decodes", max_batch=1, mode="beam",
    )  # fmt: skip
    with (
        claimed_gpu(),
        TestClient(create_app(settings), base_url="http://localhost") as client,
    ):
        wait_until_ready(client)
        answer = client.post("/v1/recommendations", json={"history": [], "k": 5})
    assert answer.status_code == 200, answer.text
    assert "CUDA out of memory" in caplog.text


@pytest.mark.parametrize(("chosen", "mode"), [("cpu", "beam"), ("cuda", "planned")])
def test_an_automatic_device_is_that_of_the_faster_measurement(
    road, claimed_gpu, monkeypatch, chosen, mode
):
    def faster(*, cpu_s, gpu_s):
        assert cpu_s > 0
        assert gpu_s > 0
        return chosen

    monkeypatch.setattr("recsys.devices.faster_device", faster)
    with claimed_gpu():
        found = Recommender.load(road[0].bundle, capture="decodes", mode="auto")
        assert (found.device.type, found.mode) == (chosen, mode)
        assert found.capture == ("passes" if chosen == "cpu" else "decodes")
        assert found.recommend([found.catalog.item_ids[:3]], k=5)[0]
        found.close()


def test_models_that_its_memory_does_not_hold_are_loaded_on_the_cpu(
    road, claimed_gpu, monkeypatch, caplog
):
    def load_model(path, *, device, **options):
        if device == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(path, device=device, **options)

    right = loading.load_model
    monkeypatch.setattr(loading, "load_model", load_model)
    monkeypatch.setattr(devices, "LARGE_BYTES", 1)  # so nothing is measured
    with claimed_gpu():
        found = Recommender.load(road[0].bundle, capture="decodes")
        assert (found.device.type, found.mode, found.capture) == ("cpu", "beam", "passes")
        (line,) = (record for record in caplog.records if record.levelname == "WARNING")
        assert "CUDA out of memory" in line.getMessage()
        assert "device=cuda asks for it" in line.getMessage()
        assert _load(road[0].bundle, EvaluationConfig()).device.type == "cpu"
        with pytest.raises(torch.OutOfMemoryError):
            Recommender.load(road[0].bundle, device="cuda")
