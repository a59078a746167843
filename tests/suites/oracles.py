"""Small models, slow reference searches, and bounds for results in float32."""

from __future__ import annotations

import copy
import os
import select
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
import transformers
from huggingface import Ranking, same_ranking
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recsys.interactions import Interactions

if TYPE_CHECKING:
    from recsys.constraint import ItemTrie

ARCHITECTURES = ("llama", "llama-gqa", "mistral-window", "qwen3", "qwen3-mixed-window", "phi3")
PATIENCE_S = 600  # what tests wait at most for what must come: a guard against a hang, no more
EPSILON = float(np.finfo(np.float32).eps)


def has_ended(pid: int) -> bool:
    """Whether a process ends, which a busy machine may let a killed one do some time later."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(handle):
        return bool(select.select([handle], [], [], PATIENCE_S)[0])


def interactions_of(
    user: Sequence[str],
    item: Sequence[str],
    timestamp: Sequence[int] | None = None,
    rating: Sequence[float] | None = None,
    *,
    item_ids: NDArray[np.str_] | None = None,
) -> Interactions:
    """Interactions from outside ids in source order, which is the order without timestamps.

    Users and items are numbered as they appear, or items by their place in `item_ids`.
    """
    users, user_ids = pd.factorize(np.asarray(user, np.object_))
    items, found = pd.factorize(np.asarray(item, np.object_))
    if item_ids is not None:
        items, found = pd.Index(item_ids).get_indexer(item), item_ids
    order = np.arange(len(users))
    times = order if timestamp is None else np.asarray(timestamp, np.int64)
    order = np.lexsort((order, times, users))
    users, times = users[order], times[order]
    if timestamp is None:
        times = np.arange(len(users)) - np.searchsorted(users, users)
    ratings = np.full(len(users), np.nan) if rating is None else np.asarray(rating)
    return Interactions(
        users.astype(np.int32),
        items[order].astype(np.int32),
        times,
        ratings[order].astype(np.float32),
        np.asarray(user_ids, np.str_),
        np.asarray(found, np.str_),
        timestamp is not None,
    )


def tiny_model(
    architecture: str = "llama",
    vocabulary: int = 64,
    *,
    hidden: int = 32,
    layers: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> transformers.PreTrainedModel:
    """Make a random causal LM with distributions that are peaked, so that scores rarely tie.

    `architecture` is one of `ARCHITECTURES`; `config` has other fields of the configuration.
    """
    family, _, variant = architecture.partition("-")
    values: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2 if variant == "gqa" or family != "llama" else 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": True,
    }
    if family == "mistral":
        values["sliding_window"] = 7
    if family == "qwen3":
        values["head_dim"] = hidden // 4
        if variant:
            values |= {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    values |= config
    configs = {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "qwen3": transformers.Qwen3Config,
        "phi3": transformers.Phi3Config,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(configs[family](**values))
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model.to(dtype).eval()


class RecordedRun(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A `Capture` that replays the recorded operations on the same tensors, as a GPU would.

    No Python of the computation runs in a replay, so a value that it baked in stays what it was.
    What the operations of the run allocated is overwritten before each replay: NaN in floats, and
    integers that are out of range as indices. So whatever is read before it is computed shows.

    >>> given, result = torch.tensor([2.0]), torch.zeros(1)
    >>> recorded = RecordedRun(lambda: result.copy_(given * given))
    >>> _ = given.fill_(3.0)
    >>> recorded.replay()
    >>> result
    tensor([9.])

    Attributes:
        operations: each operation, its arguments, and its results if it allocated any.
        made: the allocated results.
    """

    # Views are not recorded: the tensors that stand for them in later arguments share memory with
    # the results that the replay fills. A result that is one of the arguments (an operation in
    # place, `to` without effect) needs no copy either.

    def __init__(self, run: Callable[[], object]) -> None:
        """Run and record; RuntimeError if the run waits for a value or a size that depends on one.

        On a GPU these would be synchronisations, which a capture does not allow. `tolist` and
        `numpy` of a tensor on a CPU are not seen; on a meta tensor they raise.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []
        self.made: list[torch.Tensor] = []
        with self:
            run()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        masked = func.overloadpacket.__name__ in ("index", "index_put", "index_put_") and any(
            t.dtype == torch.bool for t in given[1:]
        )
        if func.overloadpacket.__name__ in _WAITING or masked:
            raise RuntimeError(f"{func} waits for a value, which a captured run cannot")
        found = func(*args, **kwargs)
        outputs = [t for t in tree_leaves(found) if isinstance(t, torch.Tensor)]
        known = {t.untyped_storage().data_ptr() for t in given}
        new = [t for t in outputs if t.untyped_storage().data_ptr() not in known]
        if new or func._schema.is_mutable:
            self.operations.append((func, args, kwargs, outputs if new else []))
            self.made += new
        return found

    def replay(self) -> None:
        """Overwrite all results, then run the operations again."""
        for tensor in self.made:
            whole = tensor.new_empty(0).set_(tensor.untyped_storage())
            whole.fill_(_poison(tensor.dtype))
        for func, args, kwargs, kept in self.operations:
            outputs = tree_leaves(func(*args, **kwargs))
            tensors = [t for t in outputs if isinstance(t, torch.Tensor)]
            for old, value in zip(kept, tensors, strict=False):
                if old.data_ptr() != value.data_ptr():
                    old.copy_(value)


def _poison(dtype: torch.dtype) -> float | bool:
    """A value that no computation should read."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return dtype == torch.bool or min(2**40, torch.iinfo(dtype).max)


_WAITING = {
    "_local_scalar_dense", "allclose", "equal", "is_nonzero", "item", "masked_select", "nonzero",
    "unique", "_unique2", "unique_consecutive", "unique_dim",
}  # fmt: skip


def byte_level_tokenizer(
    texts: Iterable[str], size: int = 400
) -> transformers.PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, with `<s>` as token 0 and `</s>` as token 1.

    It has `size` tokens, including the 256 bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
    )


def random_catalog(
    rng: np.random.Generator, items: int, levels: int, vocabulary: int = 64
) -> NDArray[np.int64]:
    """Draw (items, levels) token rows with shared prefixes; rows may repeat.

    Tokens lie in [1, vocabulary). Later levels use fewer tokens.
    """
    return np.stack(
        [rng.integers(1, max(2, vocabulary >> (level // 2)), items) for level in range(levels)],
        axis=1,
    )


def random_prompts(
    rng: np.random.Generator, batch: int, longest: int, vocabulary: int = 64
) -> list[NDArray[np.int64]]:
    """Draw prompts of unequal lengths between 1 and `longest`."""
    return [rng.integers(1, vocabulary, rng.integers(1, longest + 1)) for _ in range(batch)]


def reference_beam_search(
    model: transformers.PreTrainedModel,
    prompt: NDArray[np.int64],
    catalog: NDArray[np.int64],
    num_beams: int,
) -> list[tuple[tuple[int, ...], float]]:
    """Beam search in plain Python that recomputes everything: (sequence, score), best first.

    Ties go to the lower row of the sorted catalog.
    """
    rows = {tuple(int(t) for t in row) for row in catalog}
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for depth in range(1, catalog.shape[1] + 1):
        prefixes = {row[:depth] for row in rows}
        candidates = []
        for sequence, score in beams:
            tokens = torch.tensor([[*prompt.tolist(), *sequence]])
            with torch.inference_mode():
                logits = model(tokens).logits[0, -1].double()
            allowed = sorted(p[-1] for p in prefixes if p[:-1] == sequence)
            logits = logits - logits.logsumexp(-1)
            candidates += [((*sequence, t), score + float(logits[t])) for t in allowed]
        beams = sorted(candidates, key=lambda c: (-c[1], c[0]))[:num_beams]
    return beams


def allowed_error(other: Any, exact: Any, *, times: float = 4.0, ulps: float = 8.0) -> float:
    """How far from float64 results a way to compute them in float32 may be.

    The order of sums, and with it the rounding, depends on the processor, so no fixed bound holds
    everywhere. The error of another way on the same processor is the measure instead.

    Args:
        other: results of another way to compute the same in float32; a tensor, an array or a list.
        exact: the same results in float64.
        times: how many times the largest error of `other` is allowed.
        ulps: what is allowed in any case, in roundings of the largest of the exact results.

    Raises:
        AssertionError: they are infinite or NaN at other places than the exact ones.
    """
    sizes = _as_double(exact).nan_to_num(0, 0, 0).abs().flatten().tolist()
    return times * _largest_error(other, exact) + ulps * EPSILON * max(sizes, default=0.0)


def assert_as_exact(found: Any, other: Any, exact: Any, **allowed: float) -> None:
    """Check that float32 results are about as near to float64 ones as those of another way.

    Takes what `allowed_error` takes; AssertionError says how large both errors are.
    """
    most, error = allowed_error(other, exact, **allowed), _largest_error(found, exact)
    if not error <= most:
        raise AssertionError(
            f"the largest error is {error:.3g}, that of the other way "
            f"{_largest_error(other, exact):.3g}; at most {most:.3g} is allowed"
        )


def same_list(found: Ranking, other: Ranking, exact: Ranking) -> bool:
    """Whether a list that was found in float32 is the exact one, as far as float32 can tell.

    Scores may be as far from those of the exact list as `allowed_error` says for `other`, which is
    the list of another way in float32; items may change places if their scores are that near.
    """
    known = dict(other)
    common = [(known[item], score) for item, score in exact if item in known]
    allowed = allowed_error(*np.array(common).reshape(-1, 2).T)
    return same_ranking(found, exact, tolerance=allowed, tie=2 * allowed)


def exact_twin(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """A copy in float64 of a model, whose results are the exact ones for `assert_as_exact`."""
    return copy.deepcopy(model).double()


def exact_scores(
    model: transformers.PreTrainedModel,
    prompts: Sequence[NDArray[np.int64]],
    trie: ItemTrie,
    rows: torch.Tensor,
) -> torch.Tensor:
    """(B, K) sums of log-probabilities in float64 of rows of a trie; -inf where a row is -1.

    One plain forward of the model an item.
    """
    twin, scores = exact_twin(model), torch.full(rows.shape, -torch.inf, dtype=torch.float64)
    for (b, k), row in np.ndenumerate(rows.numpy()):
        if row >= 0:
            answer = trie.rows[row]
            tokens = torch.from_numpy(np.concatenate([prompts[b], answer]))[None]
            with torch.inference_mode():
                logits = twin(tokens).logits[0, len(prompts[b]) - 1 : -1]
            scores[b, k] = logits.log_softmax(-1)[range(len(answer)), answer].sum()
    return scores


def _largest_error(values: Any, exact: Any) -> float:
    values, exact = _as_double(values), _as_double(exact)
    if values.shape != exact.shape:
        raise AssertionError(f"shapes differ: {tuple(values.shape)} and {tuple(exact.shape)}")
    kinds = [
        torch.where(x.isfinite(), 0.0, x.nan_to_num(nan=1.0)) for x in (values, exact)
    ]  # 0 where finite
    if not torch.equal(*kinds):
        raise AssertionError("values are infinite or NaN at other places than the exact ones")
    finite = exact.isfinite()
    return float((values - exact)[finite].abs().max()) if finite.any() else 0.0


def _as_double(values: Any) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.detach().to(torch.float64)
    return torch.from_numpy(np.asarray(values, dtype=np.float64))
