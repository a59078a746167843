"""Several processes: one that is killed, parameters that are shared out, checkpoints of both."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parent))
import test_loop
from oracles import assert_as_exact

ROOT = Path(__file__).parents[2]

JOB = """
import os
from dataclasses import replace
import test_loop
from safetensors.torch import save_file

folder, shared, kill, plain = Path({folder!r}), {shared!r}, {kill!r}, {plain!r}
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

class Killer(test_loop.DyingData):
    def epoch(self, epoch, start=0):
        try:
            yield from super().epoch(epoch, start)
        except test_loop.Dies:
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

# The second process dies when it has begun its ninth step; the one that stands in for it does not.
died = Path(f"{{folder}}.died")
data = Killer(16 if kill and rank == 1 and not died.exists() else -1)
module = test_loop.make_module(seed=restarts)  # a new process has other weights until it resumes
if plain:
    module.eval()  # no dropout
values = iter([0.1, 0.3, 0.2])

def validate():
    # A part of the module, which takes whole parameters.
    with torch.inference_mode():
        module.model(torch.arange(8).view(2, 4))
    return {{"ndcg@10": next(values)}}

config = replace(test_loop.CONFIG, checkpoint_minutes=0, evaluate_every=1 if shared else 0)
_, progress = test_loop.run(folder, config, data, module, validate=validate)
state = {{name: p.detach().clone() for name, p in module.named_parameters()}}
save_file(state, f"{{folder}}-{{rank}}.safetensors")
Path(f"{{folder}}-{{rank}}.txt").write_text(f"{{progress.step}} {{died.exists()}}")
"""


def train(two_processes, folder: Path, **options: bool) -> list[str]:
    """Train the toy in two processes; what each says of itself at the end."""
    given = {"kill": False, "shared": False, "plain": False, **options}
    two_processes(
        folder.with_suffix(".py"),
        JOB.format(folder=str(folder), **given),
        *("--max-restarts", "5", "--monitor-interval", "0.1"),
        ACCELERATE_USE_FSDP=str(given["shared"]).lower(),
    )
    return [Path(f"{folder}-{rank}.txt").read_text() for rank in range(2)]


def weights(folder: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(f"{folder}-{rank}.safetensors")


@pytest.mark.slow
def test_a_killed_worker_is_replaced_with_the_bits_of_a_run_that_was_not(two_processes, tmp_path):
    """Both are those of one process with twice the batches, but for rounding."""
    straight = train(two_processes, tmp_path / "straight", plain=True)
    assert straight == ["15 False"] * 2
    killed = train(two_processes, tmp_path / "killed", plain=True, kill=True)
    assert killed == ["15 True"] * 2
    found = weights(tmp_path / "straight")
    for name, rank in (("straight", 1), ("killed", 0), ("killed", 1)):
        others = weights(tmp_path / name, rank)
        assert all(torch.equal(value, others[key]) for key, value in found.items())
    config = replace(test_loop.CONFIG, accumulate=2)
    alone, _ = test_loop.run(tmp_path / "one", config, module=test_loop.make_module().eval())
    module = test_loop.make_module().eval().double()
    exact, _ = test_loop.run(tmp_path / "exact", config, module=module)
    for name, parameter in alone.named_parameters():
        assert_as_exact(found[name], parameter, exact.get_parameter(name))


@pytest.mark.slow
def test_sharded_parameters_are_saved_whole_and_resume_alone(two_processes, tmp_path):
    assert train(two_processes, tmp_path / "shared", shared=True) == ["15 False"] * 2
    first, second = (weights(tmp_path / "shared", rank) for rank in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    plain = dict(test_loop.make_module().named_parameters())
    assert {name: p.shape for name, p in plain.items()} == {n: p.shape for n, p in first.items()}
    assert any(not torch.equal(p.detach(), first[name]) for name, p in plain.items())
    # Its checkpoint is whole, so one process can take it up; here nothing is left to train.
    config = replace(test_loop.CONFIG, evaluate_every=1, max_steps=15)
    nothing = test_loop.DyingData(0)
    again, progress = test_loop.run(tmp_path / "shared", config, nothing)
    assert (progress.step, progress.best) == (15, {"ndcg@10": 0.3})
    assert all(torch.equal(p, first[name]) for name, p in again.named_parameters())


@pytest.mark.parametrize("name", ["ddp", "fsdp-7b-lora"])
def test_a_launch_configuration_is_read_by_accelerate(name):
    from accelerate.commands.config.config_args import load_config_from_file

    file = ROOT / "configs" / "accelerate" / f"{name}.yaml"
    config = load_config_from_file(str(file))
    assert config.num_processes > 1
    assert config.mixed_precision == "no", "the loop's own setting decides"
    assert file.name in file.read_text().split("accelerate launch", 1)[1]
    if "fsdp" in name:
        assert yaml.safe_load(file.read_text())["fsdp_config"]["fsdp_version"] == 2
