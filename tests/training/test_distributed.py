"""Two processes: one of them is killed, and a checkpoint is taken up by a single process."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import test_loop
from oracles import assert_as_exact

from recsys.training.batches import Batch

ROOT = Path(__file__).parents[2]

JOB = """
import os
from dataclasses import replace
import test_loop
from safetensors.torch import save_file

folder, kill = Path({folder!r}), {kill!r}
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
# A new process has other weights until it resumes. Without dropout.
module = test_loop.make_module(seed=restarts).eval()
config = replace(test_loop.CONFIG, checkpoint_minutes=0)
_, progress = test_loop.run(folder, config, data, module)
state = {{name: p.detach().clone() for name, p in module.named_parameters()}}
save_file(state, f"{{folder}}-{{rank}}.safetensors")
Path(f"{{folder}}-{{rank}}.txt").write_text(f"{{progress.step}} {{died.exists()}}")
"""


class Pairs:
    """Each batch is two of `make_data`, of equal sizes: what two processes see in a step."""

    def __init__(self):
        self.data = test_loop.make_data()

    def count(self, epoch=0):
        return self.data.count(epoch) // 2

    def epoch(self, epoch, start=0):
        batches = list(self.data.epoch(epoch, 2 * start))
        for pair in zip(batches[::2], batches[1::2], strict=True):
            yield Batch(
                *(np.concatenate(part) for part in zip(*(b.inputs for b in pair), strict=True))
            )


def train(two_processes, folder: Path, *, kill: bool = False) -> list[str]:
    """Train the toy in two processes; what each says of itself at the end."""
    two_processes(
        folder.with_suffix(".py"),
        JOB.format(folder=str(folder), kill=kill),
        *("--max-restarts", "5", "--monitor-interval", "0.1"),
    )
    return [Path(f"{folder}-{rank}.txt").read_text() for rank in range(2)]


def weights(folder: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(f"{folder}-{rank}.safetensors")


@pytest.mark.slow
def test_a_killed_worker_is_replaced_with_the_bits_of_a_run_that_was_not(two_processes, tmp_path):
    """Both are those of one process with twice the batches, but for rounding."""
    assert train(two_processes, tmp_path / "straight") == ["15 False"] * 2
    assert train(two_processes, tmp_path / "killed", kill=True) == ["15 True"] * 2
    found = weights(tmp_path / "straight")
    for name, rank in (("straight", 1), ("killed", 0), ("killed", 1)):
        others = weights(tmp_path / name, rank)
        assert all(torch.equal(value, others[key]) for key, value in found.items())
    alone, _ = test_loop.run(tmp_path / "one", data=Pairs(), module=test_loop.make_module().eval())
    module = test_loop.make_module().eval().double()
    exact, _ = test_loop.run(tmp_path / "exact", data=Pairs(), module=module)
    for name, parameter in alone.named_parameters():
        assert_as_exact(found[name], parameter, exact.get_parameter(name))
    # One process can take up the checkpoint of two; here nothing is left to train.
    config = replace(test_loop.CONFIG, max_steps=15)
    again, progress = test_loop.run(tmp_path / "straight", config, test_loop.DyingData(0))
    assert progress.step == 15
    assert all(torch.equal(p, found[name]) for name, p in again.named_parameters())


def test_the_launch_configuration_is_read_by_accelerate():
    from accelerate.commands.config.config_args import load_config_from_file

    file = ROOT / "configs" / "accelerate" / "ddp.yaml"
    config = load_config_from_file(str(file))
    assert config.num_processes > 1
    assert config.mixed_precision == "no", "the loop's own setting decides"
    assert file.name in file.read_text().split("accelerate launch", 1)[1]
