"""fit: budgets, schedule, the best weights, and resuming after any kind of end."""

import json
import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import recsys.training.loop
from recsys.errors import ConfigError
from recsys.interactions import Histories
from recsys.models.checkpoint import build
from recsys.prompts import PromptConfig
from recsys.training.batches import TrainingBatches
from recsys.training.loop import autocast_dtype, fit
from recsys.training.objective import NextToken
from recsys.training.settings import LoopConfig
from recsys.training.state import Checkpoints
from recsys.vocabulary import Vocabulary

CONFIG = LoopConfig(
    epochs=3, warmup_steps=4, evaluate_every=0, checkpoint_minutes=1e9, precision="float32",
)  # fmt: skip
STEPS = 30  # ten batches an epoch


def make_module(seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "attention_dropout": 0.1}
    model = build(sizes, Vocabulary.from_levels([5, 5]))
    model.set_attn_implementation("eager")
    return NextToken(model, label_smoothing=0.05, dropout=0.1).train()


def make_data():
    rng = np.random.default_rng(0)
    histories = Histories.of([rng.integers(0, 25, 5) for _ in range(60)])
    tokens = np.stack(np.unravel_index(np.arange(25), (5, 5)), 1) + np.array([2, 7])
    return TrainingBatches.of(
        histories, PromptConfig(8, 4), tokens,
        prefix=(1,), pad=0, max_tokens=66, item_dropout=0.0, seed=0,
    )  # fmt: skip


def run(folder, config=CONFIG, data=None, module=None, **options):
    module = module or make_module()
    checkpoints = Checkpoints(folder, {"settings": 1})
    progress = fit(module, data or make_data(), config, checkpoints, name="toy", **options)
    return module, progress


def same_bits(a, b):
    other = b.state_dict()
    return all(torch.equal(value, other[key]) for key, value in a.state_dict().items())


def lines(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


class Dies(Exception):  # noqa: N818 - it is no error here
    """Stands for a crash at a chosen moment."""


class DyingData:
    """Batches that end in a crash when the `after`-th one has been asked for."""

    def __init__(self, after, data=None):
        self.data, self.left = data or make_data(), after

    def count(self, epoch=0):
        return self.data.count(epoch)

    def epoch(self, epoch, start=0):
        for batch in self.data.epoch(epoch, start):
            if self.left == 0:
                raise Dies
            self.left -= 1
            yield batch


class Killer(DyingData):
    """Ends the process where the other one raises."""

    def epoch(self, epoch, start=0):
        try:
            yield from super().epoch(epoch, start)
        except Dies:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("steps", [1, 10, 17])  # ten are an epoch
def test_a_run_killed_by_sigkill_ends_with_the_same_bits(tmp_path, forked, steps):
    straight, _ = run(tmp_path / "straight")
    folder = tmp_path / "killed"
    every_step = replace(CONFIG, checkpoint_minutes=0)
    assert forked(run, folder, every_step, Killer(steps)) == -signal.SIGKILL
    assert [p.name for p in folder.glob("step-*")] == [f"step-{steps}"]
    resumed, progress = run(folder, module=make_module(seed=9))
    assert progress.step == STEPS
    assert same_bits(resumed, straight)


@pytest.mark.parametrize("broken", ["save_file", "rename"])
def test_a_crash_during_a_checkpoint_keeps_the_previous_one(tmp_path, monkeypatch, broken):
    straight, _ = run(tmp_path / "straight")
    every_step = replace(CONFIG, checkpoint_minutes=0)
    written = []

    def dying(real):
        def wrapper(*args, **kwargs):
            written.append(args)
            if len(written) == 12:
                raise Dies
            return real(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patch:
        if broken == "rename":
            patch.setattr(Path, "rename", dying(Path.rename))
        else:
            patch.setattr("recsys.training.state.save_file", dying(recsys.training.state.save_file))
        with pytest.raises(Dies):
            run(tmp_path / "killed", every_step)
    assert [p.name for p in (tmp_path / "killed").glob("step-*")] == ["step-11"]
    resumed, _ = run(tmp_path / "killed", module=make_module(seed=9))
    assert same_bits(resumed, straight)


def test_a_finished_run_is_not_trained_again(tmp_path):
    first, _ = run(tmp_path)
    again, progress = run(tmp_path, data=DyingData(0), module=make_module(seed=9))
    assert progress.step == STEPS
    assert same_bits(first, again)


def test_the_main_process_decides_when_all_write_a_checkpoint(tmp_path, monkeypatch):
    """Clocks differ: a process that wrote one alone would wait for the others for ever."""

    def answer(_, value):
        return True if value is False else value

    saved = []
    monkeypatch.setattr(recsys.training.loop._Run, "_agree", answer)
    monkeypatch.setattr(Checkpoints, "save", lambda *_: saved.append(1))
    run(tmp_path)
    assert len(saved) == STEPS + 1


def test_a_checkpoint_of_other_settings_is_ignored(tmp_path):
    run(tmp_path, replace(CONFIG, max_steps=3))
    checkpoints = Checkpoints(tmp_path, {"settings": 2})
    progress = fit(
        make_module(), make_data(), replace(CONFIG, max_steps=2), checkpoints, name="toy"
    )
    assert progress.step == 2


def test_checkpoints_hold_no_pickle(tmp_path):
    run(tmp_path, replace(CONFIG, checkpoint_minutes=0, max_steps=3))
    files = {p.suffix for p in tmp_path.rglob("*") if p.is_file()}
    assert files == {".safetensors", ".json", ".jsonl"}


def scores(*values):
    """A validation that returns these NDCGs one after the other."""
    remaining = list(values)
    return lambda: {"ndcg@10": remaining.pop(0), "recall@10": 0.5}


def test_the_best_validated_weights_are_kept(tmp_path):
    kept = {}

    def validate():
        kept[len(kept)] = {k: v.clone() for k, v in module.state_dict().items()}
        return {"ndcg@10": [0.1, 0.3, 0.2][len(kept) - 1]}

    module = make_module()
    _, progress = run(tmp_path, replace(CONFIG, evaluate_every=1), module=module, validate=validate)
    assert progress.best == {"ndcg@10": 0.3}
    assert all(torch.equal(v, kept[1][k]) for k, v in module.state_dict().items())


def test_training_stops_when_validation_no_longer_improves(tmp_path):
    config = replace(CONFIG, epochs=50, evaluate_every=1, patience=2)
    _, progress = run(tmp_path, config, validate=scores(0.2, 0.3, 0.25, 0.3, 0.9))
    assert (progress.epoch, progress.stale, progress.best["ndcg@10"]) == (4, 2, 0.3)


def test_the_best_weights_survive_a_crash(tmp_path):
    config = replace(CONFIG, evaluate_every=1)
    straight, _ = run(tmp_path / "straight", config, validate=scores(0.3, 0.2, 0.1))
    with pytest.raises(Dies):
        run(tmp_path / "killed", config, DyingData(25), validate=scores(0.3, 0.2))
    resumed, progress = run(tmp_path / "killed", config, validate=scores(0.1))
    assert progress.best["ndcg@10"] == 0.3
    assert same_bits(resumed, straight)


def test_training_ends_with_a_validation_even_between_two(tmp_path):
    _, progress = run(tmp_path, replace(CONFIG, evaluate_every=2), validate=scores(0.1, 0.2))
    assert (progress.evaluated, progress.best["ndcg@10"]) == (STEPS, 0.2)


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def ticking(self, seconds, data=None):
        clock = self

        class Ticking(DyingData):
            def epoch(self, epoch, start=0):
                for batch in super().epoch(epoch, start):
                    clock.now += seconds
                    yield batch

        return Ticking(-1, data)


def test_a_time_budget_ends_training_and_the_schedule_follows_it(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    monkeypatch.setattr(recsys.training.loop, "LOG_EVERY_STEPS", 1)
    config = replace(CONFIG, epochs=1000, max_minutes=1, warmup_steps=0)
    _, progress = run(tmp_path, config, clock.ticking(5.0))
    assert progress.step == 11, "the twelfth begins at 60 s, when the minute is over"
    rates = [line["learning_rate"] for line in lines(tmp_path)]
    share = (30 - 3) / (60 - 3)  # of the sixth step, without the first twentieth of the minute
    half = config.learning_rate * (1 + math.cos(math.pi * share)) / 2
    assert rates[5] == pytest.approx(half, rel=1e-4)
    assert rates == sorted(rates, reverse=True)


def test_a_resumed_run_has_only_the_time_that_was_left(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    config = replace(CONFIG, epochs=1000, max_minutes=1, checkpoint_minutes=0)
    data = clock.ticking(5.0)
    data.left = 8
    with pytest.raises(Dies):
        run(tmp_path, config, data)
    clock.now += 1e6  # the machine was off for days
    _, progress = run(tmp_path, config, clock.ticking(5.0))
    assert progress.step == 11
    assert progress.seconds == pytest.approx(60)


def test_warm_up_rises_by_steps_and_the_cosine_ends_at_zero(tmp_path, monkeypatch):
    monkeypatch.setattr(recsys.training.loop, "LOG_EVERY_STEPS", 1)
    run(tmp_path, CONFIG)
    rates = np.array([line["learning_rate"] for line in lines(tmp_path)]) / CONFIG.learning_rate
    assert rates[:3] == pytest.approx([0.25, 0.5, 0.75], abs=0.02)
    assert rates[3:].tolist() == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.0, abs=0.02)


def test_the_log_of_a_resumed_run_has_each_step_once(tmp_path, monkeypatch):
    monkeypatch.setattr(recsys.training.loop, "LOG_EVERY_STEPS", 2)
    run(tmp_path / "straight")
    saving = replace(CONFIG, evaluate_every=1)  # checkpoints at steps 10 and 20
    with pytest.raises(Dies):
        run(tmp_path / "killed", saving, DyingData(15), validate=scores(0.1))
    run(tmp_path / "killed", saving, validate=scores(0.1, 0.1))
    loss = {
        name: {line["step"]: line["loss"] for line in lines(tmp_path / name) if "loss" in line}
        for name in ("straight", "killed")
    }
    assert loss["killed"] == loss["straight"]
    steps = [line["step"] for line in lines(tmp_path / "killed") if "loss" in line]
    assert steps == sorted(set(steps))


def test_a_loss_that_is_not_finite_says_what_to_change(tmp_path, monkeypatch):
    monkeypatch.setattr(recsys.training.loop, "LOG_EVERY_STEPS", 1)
    module = make_module()
    with torch.no_grad():
        module.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ConfigError, match="lower learning_rate"):
        run(tmp_path, module=module)


def test_norms_are_not_decayed():
    groups = recsys.training.loop.make_optimizer(make_module(), CONFIG).param_groups
    assert {p.ndim for p in groups[0]["params"]} == {2}
    assert {p.ndim for p in groups[1]["params"]} == {1}
    assert groups[1]["weight_decay"] == 0


def test_precision_follows_the_processor_by_default(monkeypatch):
    cpu = torch.device("cpu")
    assert autocast_dtype("bf16", cpu) == torch.bfloat16
    assert autocast_dtype("float32", cpu) == torch.float32
    for fast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda fast=fast: fast)
        assert autocast_dtype("auto", cpu) == dtype
