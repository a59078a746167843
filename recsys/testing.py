"""Small models, slow reference searches and server processes for tests and benchmarks.

`recsys.decoding` must agree with `reference_beam_search` and `huggingface_beam_search`.
"""

from __future__ import annotations

import asyncio
import copy
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recsys.errors import RecsysError

if TYPE_CHECKING:
    from recsys.constraint import ItemTrie

Ranking = list[tuple[Any, float]]  # items or their tokens, and scores, best first
START_S = 300.0
ADDRESS = re.compile(r"answers at http://\[?([^\]\s]+?)\]?:(\d+), try")
ARCHITECTURES = ("llama", "llama-gqa", "mistral-window", "qwen3", "qwen3-mixed-window", "phi3")
PATIENCE_S = 600  # what tests wait at most for what must come: a guard against a hang, no more
EPSILON = float(np.finfo(np.float32).eps)


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
        bos_token="<s>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
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
    *,
    normalize: str = "vocabulary",
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
            total = logits.logsumexp(-1) if normalize == "vocabulary" else None
            if total is None and allowed:
                total = logits[allowed].logsumexp(-1)
            candidates += [((*sequence, t), score + float(logits[t] - total)) for t in allowed]
        beams = sorted(candidates, key=lambda c: (-c[1], c[0]))[:num_beams]
    return beams


def allowed_tokens(catalog: NDArray[np.int64]) -> dict[tuple[int, ...], list[int]]:
    """Prefix -> tokens that may follow, ascending: the fastest constraint in plain Python."""
    children: dict[tuple[int, ...], set[int]] = {}
    for row in catalog.tolist():
        for depth, token in enumerate(row):
            children.setdefault(tuple(row[:depth]), set()).add(token)
    return {prefix: sorted(tokens) for prefix, tokens in children.items()}


def huggingface_beam_search(
    model: transformers.PreTrainedModel,
    prompts: Sequence[NDArray[np.int64]],
    catalog: NDArray[np.int64] | dict[tuple[int, ...], list[int]],
    num_beams: int,
) -> list[list[tuple[tuple[int, ...], float]]]:
    """Run `generate(num_beams=K, prefix_allowed_tokens_fn=...)`; one list per request, best first.

    Scores are sums of log-probabilities over the whole vocabulary. Padding rows, which `generate`
    adds if K exceeds the catalog, are dropped. The catalog is (items, L) token rows, or the result
    of `allowed_tokens`, which takes longer than a search and should not be part of a measured time.
    """
    allowed = catalog if isinstance(catalog, dict) else allowed_tokens(catalog)
    longest = max(len(p) for p in prompts)
    row: tuple[int, ...] = ()
    while row in allowed:
        row = (*row, allowed[row][0])
    levels = len(row)
    tokens = torch.zeros((len(prompts), longest), dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for i, prompt in enumerate(prompts):
        tokens[i, longest - len(prompt) :] = torch.from_numpy(np.asarray(prompt))
        mask[i, longest - len(prompt) :] = 1

    def allow(_: int, sequence: torch.Tensor) -> list[int]:
        return allowed.get(tuple(sequence[longest:].tolist()), [0])

    with torch.inference_mode():
        output = model.generate(
            tokens.to(model.device),
            attention_mask=mask.to(model.device),
            num_beams=num_beams,
            num_return_sequences=num_beams,
            max_new_tokens=levels,
            length_penalty=0.0,
            do_sample=False,
            prefix_allowed_tokens_fn=allow,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=num_beams == 1,
        )
    sequences = output.sequences[:, longest:].tolist()
    if num_beams == 1:  # greedy search reports no scores
        steps = torch.stack([step.log_softmax(-1) for step in output.logits], dim=1)
        scores = steps.gather(-1, output.sequences[:, longest:, None]).sum((1, 2)).tolist()
    else:
        scores = output.sequences_scores.tolist()
    answers: list[list[tuple[tuple[int, ...], float]]] = []
    for i in range(len(prompts)):
        here = range(i * num_beams, (i + 1) * num_beams)
        answers.append([(tuple(sequences[j]), scores[j]) for j in here if scores[j] > -1e8])
    return answers


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


def same_ranking(
    first: Ranking,
    second: Ranking,
    *,
    tolerance: float,
    tie: float = 1e-5,
) -> bool:
    """Whether two rankings agree: same items in the same order, scores within `tolerance`.

    The order may only differ among sequences whose scores differ by at most `tie`. The same holds
    for which sequences are on the list.
    """
    if len(first) != len(second):
        return False
    for (a, a_score), (b, b_score) in zip(first, second, strict=True):
        if abs(a_score - b_score) > tolerance:
            return False
        if a != b and abs(a_score - b_score) > tie:
            return False
    scores = dict(second)
    if any(abs(score - scores[s]) > tolerance for s, score in first if s in scores):
        return False
    inner = {s for s, score in first if score > first[-1][1] + tie} if first else set()
    return inner <= scores.keys()


@dataclass(frozen=True)
class Usage:
    """What a process holds, and the processor seconds that it has used."""

    rss_bytes: int
    open_files: int
    threads: int
    cpu_s: float


@dataclass(frozen=True)
class Server:
    """A server that answers; `process` is None for one that we did not start."""

    host: str
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address, without a path."""
        return f"http://{self.host}:{self.port}"

    def usage(self) -> Usage | None:
        """Usage of the process; None for a server that we did not start."""
        if self.process is None:
            return None
        place = Path("/proc", str(self.process.pid))
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        return Usage(
            rss_bytes=int((place / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"),
            open_files=len(list((place / "fd").iterdir())),
            threads=int(fields[17]),
            cpu_s=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        )


@asynccontextmanager
async def start_server(bundle: Path, settings: Sequence[str] = ()) -> AsyncIterator[Server]:
    """Start a server on a free port, with a store of its own that is deleted afterwards.

    `settings` are `key=value` of the section `serve`.

    Raises:
        RecsysError: it ended, or took too long, before it was ready; with its error output.
    """
    with tempfile.TemporaryDirectory(prefix="recsys-load-") as folder:
        log = Path(folder, "stderr")
        own = (f"store={Path(folder, 'histories.db')}", "histories=null", "keys=null")
        command = [
            *(sys.executable, "-m", "recsys", "serve", "--bundle", str(bundle), "--port", "0"),
            *(part for key in (*own, *settings) for part in ("--set", f"serve.{key}")),
        ]
        end = time.monotonic() + START_S
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)  # noqa: S603
        try:
            while True:
                text = re.sub(r"\s+", " ", log.read_text(encoding="utf-8"))
                if found := ADDRESS.search(text):
                    break
                if process.poll() is not None or time.monotonic() > end:
                    raise RecsysError(f"the server did not start: {text.strip()}")
                await asyncio.sleep(0.05)
            yield Server(found[1], int(found[2]), process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
