"""Plugins of vLLM and SGLang, in doubles of the engines' documented interfaces.

The doubles hold a batch as the engines do: requests come, end, and change their rows. At every
step, the finite logits of each row must be those of the next tokens that plain Python finds among
the catalog's sequences.
"""

import abc
import enum
import importlib
import json
import pickle
import random
import sys
import weakref
from array import array
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from toy_bundle import items_table, write_bundle

from recsys import plugins
from recsys.bundle import Bundle
from recsys.constraint import ItemTrie
from recsys.errors import ConfigError
from recsys.plugins import next_tokens
from recsys.plugins.next_tokens import NextTokens
from recsys.vocabulary import Vocabulary

LEVELS = (5, 4, 3)
VOCABULARY = Vocabulary.from_levels(LEVELS)
CODES = np.random.default_rng(3).integers(0, LEVELS, (17, 3)).astype(np.int32)
# As the bundle's files say it: a code's token is the offset of its level and the code.
SEQUENCES = {
    tuple(offset + int(code) for offset, code in zip(VOCABULARY.level_offsets, row, strict=True))
    for row in CODES
}
WIDTH = VOCABULARY.size + 8  # engines pad the vocabulary


def expected(generated):
    """The tokens that may follow: those after the open prefix in any sequence of the catalog."""
    prefix = tuple(generated[len(generated) - len(generated) % 3 :])
    return {s[len(prefix)] for s in SEQUENCES if s[: len(prefix)] == prefix}


def finite(row):
    return set(torch.isfinite(row).nonzero().flatten().tolist())


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    table = items_table([f"i{i}" for i in range(len(CODES))])
    return write_bundle(tmp_path_factory.mktemp("home") / "shop", table, CODES, LEVELS)


@pytest.fixture
def served(bundle, monkeypatch):
    monkeypatch.setenv("RECSYS_BUNDLE", str(bundle))
    next_tokens.of_environment.cache_clear()
    yield
    next_tokens.of_environment.cache_clear()


def install(monkeypatch, name, **members):
    """Make the module `name` and its parents importable."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    vars(sys.modules[name]).update(members)


class MoveDirectionality(enum.Enum):
    UNIDIRECTIONAL = enum.auto()
    SWAP = enum.auto()


@dataclass(frozen=True)
class BatchUpdate:
    batch_size: int
    removed: list
    added: list
    moved: list


class LogitsProcessor(abc.ABC):
    @classmethod
    def validate_params(cls, sampling_params):
        return None

    @abc.abstractmethod
    def __init__(self, vllm_config, device, is_pin_memory): ...

    @abc.abstractmethod
    def apply(self, logits): ...

    @abc.abstractmethod
    def is_argmax_invariant(self): ...

    @abc.abstractmethod
    def update_state(self, batch_update): ...


@pytest.fixture
def vllm(monkeypatch, served):
    install(
        monkeypatch,
        "vllm.v1.sample.logits_processor",
        BatchUpdate=BatchUpdate,
        LogitsProcessor=LogitsProcessor,
        MoveDirectionality=MoveDirectionality,
    )
    monkeypatch.delitem(sys.modules, "recsys.plugins.vllm", raising=False)
    yield importlib.import_module("recsys.plugins.vllm").CatalogProcessor
    del sys.modules["recsys.plugins.vllm"], plugins.vllm


@dataclass
class PersistentBatch:
    """Requests by row, without gaps, and the changes since the last step."""

    rng: random.Random
    rows: list = field(default_factory=list)  # lists of generated tokens

    def change(self):
        """Random changes of one step; None if there are none."""
        removed, added, moved = [], [], []
        if self.rows and self.rng.random() < 0.3:  # one ends, and the last row fills the gap
            row = self.rng.randrange(len(self.rows))
            last = len(self.rows) - 1
            if self.rng.random() < 0.3:  # or a new request takes the row, without a removal
                self.rows[row] = []
                added.append((row, SimpleNamespace(extra_args=None), [1, 2], self.rows[row]))
            else:
                removed.append(row)
                self.rows[row] = self.rows[last]
                self.rows.pop()
                if row != last:
                    moved.append((last, row, MoveDirectionality.UNIDIRECTIONAL))
        elif len(self.rows) < 6 and self.rng.random() < 0.6:
            self.rows.append([])
            added.append((len(self.rows) - 1, SimpleNamespace(extra_args={}), None, self.rows[-1]))
        if len(self.rows) > 1 and self.rng.random() < 0.3:
            a, b = self.rng.sample(range(len(self.rows)), 2)
            self.rows[a], self.rows[b] = self.rows[b], self.rows[a]
            moved.append((a, b, MoveDirectionality.SWAP))
        if not (removed or added or moved):
            return None
        return BatchUpdate(len(self.rows), removed, added, moved)


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_vllm_allow_the_next_tokens_of_the_catalog(vllm, seed):
    rng = random.Random(seed)
    batch, processor = PersistentBatch(rng), vllm(None, torch.device("cpu"), False)
    steps = 0
    for _ in range(120):
        processor.update_state(batch.change())
        before = torch.randn(len(batch.rows), WIDTH)
        logits = processor.apply(before.clone())
        for row, generated in enumerate(batch.rows):
            allowed = finite(logits[row])
            assert allowed == expected(generated)
            kept = sorted(allowed)
            assert torch.equal(logits[row, kept], before[row, kept])
            generated.append(rng.choice(kept))
            steps += 1
    assert steps > 100


def test_the_processor_of_vllm_changes_greedy_choices(vllm):
    assert vllm(None, torch.device("cpu"), False).is_argmax_invariant() is False


def test_a_token_that_is_not_known_yet_is_an_error(vllm):
    processor = vllm(None, torch.device("cpu"), False)
    first = next(iter(SEQUENCES))[0]
    added = [(0, SimpleNamespace(extra_args=None), None, [first, -1])]
    processor.update_state(BatchUpdate(1, [], added, []))
    with pytest.raises(RuntimeError, match="asynchronous scheduling off"):
        processor.apply(torch.zeros(1, WIDTH))


@dataclass
class Request:
    """What SGLang refers to weakly, as `__req__`."""

    output_ids: array = field(default_factory=lambda: array("q"))


class CustomLogitProcessor(abc.ABC):
    @abc.abstractmethod
    def __call__(self, logits, custom_param_list=None): ...

    @classmethod
    def to_str(cls):
        return json.dumps({"callable": pickle.dumps(cls).hex()})

    @classmethod
    def from_str(cls, text):
        return pickle.loads(bytes.fromhex(json.loads(text)["callable"]))()


@pytest.fixture
def sglang(monkeypatch, served):
    name = "sglang.srt.sampling.custom_logit_processor"
    install(monkeypatch, name, CustomLogitProcessor=CustomLogitProcessor)
    monkeypatch.delitem(sys.modules, "recsys.plugins.sglang", raising=False)
    yield importlib.import_module("recsys.plugins.sglang").CatalogProcessor
    del sys.modules["recsys.plugins.sglang"], plugins.sglang


def test_rows_of_sglang_allow_the_next_tokens_of_the_catalog(sglang):
    """Some requests of the batch have the processor, as its batch mask says, and others do not."""
    rng = random.Random(0)
    processor = CustomLogitProcessor.from_str(sglang.to_str())
    requests = [Request() for _ in range(5)]
    chosen = torch.tensor([True, False, True, True, False])
    parameters = [
        {"other": 1} | {"__req__": weakref.proxy(request)} if has else None
        for request, has in zip(requests, chosen.tolist(), strict=True)
    ]
    for _ in range(30):
        before = torch.randn(5, WIDTH)
        logits = before.clone()
        own = [parameters[i] for i in chosen.nonzero().flatten().tolist()]
        logits[chosen] = processor(logits[chosen], own)
        assert torch.equal(logits[~chosen], before[~chosen])
        for row, request in enumerate(requests):
            if chosen[row]:
                allowed = finite(logits[row])
                assert allowed == expected(request.output_ids)
                request.output_ids.append(rng.choice(sorted(allowed)))


@pytest.mark.parametrize("parameters", [None, [None], [{}]], ids=["none", "null", "empty"])
def test_a_request_of_sglang_without_its_tokens_is_refused(sglang, parameters):
    with pytest.raises(ValueError, match="custom_params"):
        sglang()(torch.zeros(1, WIDTH), parameters)


@pytest.mark.parametrize("processor", ["vllm", "sglang"])
def test_a_request_for_one_item_gets_one_of_the_catalog(request, processor):
    """L greedy steps with random logits end at an item, whatever the model prefers."""
    made = request.getfixturevalue(processor)
    torch.manual_seed(1)
    for _ in range(20):
        tokens: list[int] = []
        if processor == "vllm":
            processing = made(None, torch.device("cpu"), False)
            added = [(0, SimpleNamespace(extra_args=None), [1], tokens)]
            processing.update_state(BatchUpdate(1, [], added, []))
            step = processing.apply
        else:
            own = [{"__req__": SimpleNamespace(output_ids=tokens)}]
            step = lambda logits: made()(logits, own)  # noqa: B023, E731 - used in this turn only
        for _ in LEVELS:
            tokens.append(int(step(torch.randn(1, WIDTH)).argmax()))
        assert tuple(tokens) in SEQUENCES


def test_prompts_and_answers_are_read_as_documented(bundle):
    loaded = Bundle.load(bundle)
    prompt = loaded.encoder.encode(loaded.catalog.index(["i3", "i5"])).tolist()
    tokens = CODES + np.array(VOCABULARY.level_offsets)
    assert prompt == [*VOCABULARY.prefix, *tokens[3].tolist(), *tokens[5].tolist()]
    codes = loaded.vocabulary.decode(np.array(tokens[7].tolist()))
    items = np.flatnonzero((loaded.catalog.codes == codes).all(axis=1))
    assert items.tolist() == [i for i in range(len(CODES)) if (CODES[i] == CODES[7]).all()]


def test_a_foreign_token_is_followed_by_the_first_level():
    tokens = NextTokens(ItemTrie.build(sorted(SEQUENCES)))
    assert set(tokens.after([999]).tolist()) == expected([])


def test_rows_without_a_request_stay_as_they_are():
    tokens = NextTokens(ItemTrie.build(sorted(SEQUENCES)))
    logits = torch.randn(2, WIDTH)
    assert tokens.mask(logits.clone(), {}).equal(logits)
    masked = tokens.mask(logits.clone(), {1: []})
    assert masked[0].equal(logits[0])
    assert finite(masked[1]) == expected([])


def test_a_missing_bundle_is_named(monkeypatch):
    monkeypatch.delenv("RECSYS_BUNDLE", raising=False)
    next_tokens.of_environment.cache_clear()
    with pytest.raises(ConfigError, match="RECSYS_BUNDLE is not set"):
        next_tokens.of_environment()
