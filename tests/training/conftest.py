"""A toy shop in which the next item is nearly certain, as artifacts of a run."""

import os
import runpy
import signal
import tempfile
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from oracles import byte_level_tokenizer, interactions_of
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from recsys.artifacts import Workspace, write_artifact
from recsys.config import Settings
from recsys.dataset import Dataset
from recsys.pipeline import Context
from recsys.retrieval import digest
from recsys.splits import label_ends

ITEMS, USERS, LEVELS, CODES = 27, 40, 3, 3

# What stands before the code of a distributed job: it ends with the process that started it, and
# says when the processes have found each other.
SET_UP = """
import ctypes, signal, sys
from pathlib import Path
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
sys.path.insert(0, {tests!r})
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
AcceleratorState._reset_state(reset_partial_state=True)  # of the process that this is a copy of
GradientState._reset_state()
Accelerator()
torch.distributed.barrier()
Path({started!r}).touch()
"""
SET_UPS = 3  # a busy machine may need more than one to bring two processes together


def chain_dataset(users=USERS, length=9, seed=0, step=1):
    """Users walk from item to item; nine steps of ten go `step` numbers on."""
    rng = np.random.default_rng(seed)
    events = []
    for user in range(users):
        item = int(rng.integers(ITEMS))
        for _ in range(length):
            events.append((f"u{user}", f"i{item}"))
            item = (item + step) % ITEMS if rng.random() < 0.9 else int(rng.integers(ITEMS))
    ids = np.array([f"i{k}" for k in range(ITEMS)])
    who, what = zip(*events, strict=True)
    interactions = interactions_of(list(who), list(what), item_ids=ids)
    titles = [f"Thing {k}" for k in range(ITEMS)]
    words = ["red", "blue", "wool", "steel", "garden"]
    texts = [f"{words[k % 5]} {words[k // 5 % 5]} thing" for k in range(ITEMS)]
    items = pa.table({"item_id": ids, "title": titles, "text": texts})
    return Dataset(interactions, label_ends(interactions.user), items)


def unique_codes():
    return np.stack(np.unravel_index(np.arange(ITEMS), (CODES,) * LEVELS), 1).astype(np.int32)


def write_parents(workspace: Workspace, *, centroids=True, dataset=None):
    dataset = dataset or chain_dataset()
    with write_artifact(workspace.dataset, "dataset") as folder:
        dataset.save(folder)
    info = {"fitted_on": digest(dataset.train_histories)}
    with write_artifact(workspace.run("ids"), "ids", info=info) as folder:
        np.save(folder / "codes.npy", unique_codes())
        if centroids:
            values = np.random.default_rng(1).normal(size=(LEVELS, CODES, 5)).astype(np.float32)
            books = {f"centroids.{level}": book for level, book in enumerate(values)}
            save_file(books, folder / "centroids.safetensors")
            (folder / "quantizer").mkdir()
            save_file(books, folder / "quantizer" / "centroids.safetensors")


SMALL = {
    "architecture": {"hidden_size": 32, "intermediate_size": 64},
    "batch_tokens": 600,
    "evaluate_every": 2,
    "eval_users": 20,
    "warmup_steps": 5,
    "precision": "float32",
}


def contexts_of(home, monkeypatch):
    """A function that makes runs named `toy`, whose parents are written into `home`."""
    monkeypatch.setenv("RECSYS_HOME", str(home))

    def make(*, force=False, seed=0, **sections):
        target = {**SMALL, "epochs": 4, **sections.pop("target", {})}
        draft = {**SMALL, "epochs": 2, **sections.pop("draft", {})}
        values = {"name": "toy", "seed": seed, "target": target, "draft": draft, **sections}
        return Context.of(Settings(values), force=force)

    write_parents(Workspace(home, "toy"))
    return make


@pytest.fixture
def make_context(tmp_path, monkeypatch):
    """A run named `toy` with its parents; keyword arguments are the sections."""
    return contexts_of(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def module_context(tmp_path_factory):
    """A home and its `make_context`, for what the tests of a module train once."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield home, contexts_of(home, monkeypatch)


@pytest.fixture
def shop():
    return SimpleNamespace(ITEMS=ITEMS, chain_dataset=chain_dataset, write_parents=write_parents)


def die_at_step(stage, context, step):
    """Run a stage that ends this process by SIGKILL when it takes an optimizer step."""
    steps, real = count(1), torch.optim.AdamW.step

    def dying(self, *args, **kwargs):
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *args, **kwargs)

    torch.optim.AdamW.step = dying
    stage(context)


@pytest.fixture
def killed(forked):
    """Runs the training of `stage` in a process that SIGKILL ends after a number of steps."""

    def run(stage, context, steps):
        assert forked(die_at_step, stage, context, steps + 1) == -signal.SIGKILL
        checkpoint = f"{stage.__module__.rpartition('.')[2]}.checkpoint"
        found = context.workspace.run(checkpoint).glob("step-*")
        assert [path.name for path in found] == [f"step-{steps}"]

    return run


TEXT = ["the customer has bought these items before", "what will the customer buy next?"]


def write_checkpoint(
    folder, *, tied=False, bos=True, rows=None, extra=(), hidden=32, words=300, layers=2
):
    tokenizer = byte_level_tokenizer(TEXT, words)
    tokenizer.add_tokens([*extra])
    if not bos:
        tokenizer.bos_token = None
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=rows or len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return len(tokenizer)


def as_a_script(path):
    runpy.run_path(path, run_name="__main__")


def as_torchrun(script, said, options, environment):
    """Be the agent that torchrun is, with workers that are copies of it."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    with said.open("w") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    tempfile.tempdir = str(script.parent)
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "GLOO_SOCKET_IFNAME": "lo",
        # else processes that are started anew may meet addresses of those before
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **environment,
    }
    words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--nproc-per-node", "2",
             "--log-dir", str(script.with_suffix(".logs")), "--start-method", "fork",
             *options, str(script)]  # fmt: skip
    config, _, _ = config_from_args(parse_args(words))
    elastic_launch(config, as_a_script)(str(script))


@pytest.fixture
def two_processes(forked):
    """Runs code in two processes of torchrun; none of them is left, whatever happens.

    Processes that do not find each other are started again. A job that has begun is not.
    """

    def run(script, code, *options, **environment):
        started, said = script.with_suffix(".started"), script.with_suffix(".log")
        names = {"tests": str(Path(__file__).parent), "started": str(started)}
        script.write_text(SET_UP.format(**names) + code)
        for _ in range(SET_UPS):
            # a worker ends with its agent, by the signal that it asks for
            if forked(as_torchrun, script, said, options, environment) == 0:
                return
            if started.exists():
                break
        pytest.fail(said.read_text()[-3000:])

    return run


@pytest.fixture
def write_base():
    """Writes a small pretrained checkpoint into a folder and returns its number of tokens."""
    return write_checkpoint
