"""Search requests: the arguments of a search, checked once and prepared for a model and a trie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from recsys import arguments
from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.mask import RowMask
from recsys.constraint.restrictions import Allowed, Excluded, Gains
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.expand import Normalize, Step
from recsys.decoding.row_tree import RowTree
from recsys.decoding.sampling import Noise
from recsys.decoding.tree import PromptBatch, TokenTree
from recsys.models.tree_forward import TreeModel
from recsys.transfers import Upload


@dataclass(frozen=True)
class SearchRequest:
    """The arguments of a search over a batch of B prompts; every search takes one.

    Each field but `prompts` is optional. What does not depend on the model or the trie is checked
    here, the rest when a search begins.

    Attributes:
        prompts: token ids of each request, at least one token each; lengths may differ.
        exclude: trie rows that each request must not get (`ItemTrie.excluded_rows`).
        masks: the rows that each request may get; None for all of them.
        boosts: what each request's items gain. The search then finds the largest sums of
            log-probability and boost; `Beams.scores` are still log-probabilities.
        normalize: log-probabilities over the whole `vocabulary`, or over the `allowed` tokens only.
        seeds: one a request: draw K sequences without replacement from the model's distribution
            over what is allowed (`recsys.decoding.sampling`), in the order drawn. None searches for
            the best.
        temperature: divides the logits of a sample; at least `recsys.arguments.MIN_TEMPERATURE`.
        candidates: trie rows of each request, most wanted first. They are scored in the first pass,
            whether the search finds them or not (`Beams.candidate_scores`).
        candidate_nodes: number of tree nodes to spend on them (`RowTree`); None for all they need.
        prompt_slots: cache slots to reserve for each prompt, at least. If this is the length of the
            longest prompt of all requests (and `candidate_nodes` a fixed number), an answer has the
            same bits alone and in any batch.

    Raises:
        ValueError: a field that is not of its kind or range (the text names it), another number of
            entries than prompts, a sample with boosts or candidates, or candidates with `normalize`
            other than `vocabulary`.

    >>> SearchRequest([[1, 2, 3], [4]], exclude=[[7], []]).exclude
    [[7], []]
    >>> SearchRequest([[1, 2, 3]], seeds=[1, 2])
    Traceback (most recent call last):
    ValueError: seeds has 2 entries for 1 prompts
    """

    prompts: Sequence[ArrayLike]
    exclude: Sequence[ArrayLike] | None = None
    masks: Sequence[RowMask | None] | None = None
    boosts: Sequence[Boost | None] | None = None
    normalize: Normalize = "vocabulary"
    seeds: Sequence[int] | None = None
    temperature: float = 1.0
    candidates: Sequence[ArrayLike] | None = None
    candidate_nodes: int | None = None
    prompt_slots: int = 0

    def __post_init__(self) -> None:
        arguments.temperature(self.temperature)
        if self.normalize not in ("vocabulary", "allowed"):
            raise ValueError(f"normalize {self.normalize!r} is neither 'vocabulary' nor 'allowed'")
        for name in ("exclude", "masks", "boosts", "seeds", "candidates"):
            if getattr(self, name) is not None:
                arguments.one_each(name, getattr(self, name), len(self.prompts))
        for name, kind in (("masks", RowMask), ("boosts", Boost)):
            for i, value in enumerate(getattr(self, name) or ()):
                if value is not None and not isinstance(value, kind):
                    raise ValueError(
                        f"{name}: that of request {i} is a {type(value).__name__}, not a "
                        f"{kind.__name__}"
                    )
        if self.seeds is not None:
            arguments.integers("seeds", self.seeds)
            if any(self.boosts or ()):
                raise ValueError("boosts: a sample is drawn from the model's distribution alone")
        if self.candidates is not None:
            if self.seeds is not None or self.normalize != "vocabulary":
                raise ValueError("candidates: scored over the whole vocabulary, and in no sample")
            if self.candidate_nodes is not None:
                arguments.whole_number(
                    "candidate_nodes", self.candidate_nodes, 0, arguments.MOST_NODES
                )

    def __len__(self) -> int:
        """B."""
        return len(self.prompts)

    @classmethod
    def of(cls, request: SearchRequest | Sequence[ArrayLike]) -> SearchRequest:
        """`request` itself, or the request that prompts alone make."""
        return request if isinstance(request, cls) else cls(request)  # type: ignore[arg-type]

    def reserving(self, prompt_slots: int) -> SearchRequest:
        """The same request with at least `prompt_slots` reserved for each prompt."""
        return replace(self, prompt_slots=max(self.prompt_slots, prompt_slots))


@dataclass(frozen=True)
class Search:
    """A request prepared for a model and a trie, on the model's device.

    Its tensors must not be read before `send`.

    Attributes:
        model: the target.
        prompts: checked and padded.
        step: trie, exclusions, masks, boosts and noise: what every step shares.
        rows: the tree of the request's candidates, or None.
    """

    model: TreeModel
    prompts: PromptBatch
    step: Step
    rows: RowTree | None = None

    @classmethod
    def of(
        cls,
        request: Search | SearchRequest | Sequence[ArrayLike],
        model: Any,
        trie: ItemTrie | DeviceTrie,
    ) -> Search:
        """Prepare a request, or prompts alone; one that is prepared already is returned as it is.

        Raises:
            ValueError: an empty prompt, a token (of a prompt or of the catalog) outside the model's
                vocabulary, more positions than the model is exact for, a row outside the trie, a
                mask or boost of another trie.
        """
        if isinstance(request, Search):
            return request
        request, model = SearchRequest.of(request), TreeModel.of(model)
        levels = (trie if isinstance(trie, ItemTrie) else trie.source).num_levels
        prompts = PromptBatch.of(request.prompts, model, levels - 1, slots=request.prompt_slots)
        trie = DeviceTrie.of(trie, model.device)
        check_vocabulary(model, trie)
        step = _step(request, prompts.upload, trie)
        if request.candidates is None:
            return cls(model, prompts, step)
        num_rows = trie.source.num_rows
        rows = arguments.rows_of_requests("candidates", request.candidates, len(request), num_rows)
        tree = RowTree.of(trie, rows, request.candidate_nodes, prompts.upload)
        return cls(model, prompts, step, tree)

    def __len__(self) -> int:
        """B."""
        return len(self.prompts)

    def widths(self, num_beams: int) -> list[int]:
        """Most beams of levels 1 .. L: K, or fewer where a level of the trie has fewer states."""
        trie = self.step.trie.source
        return [trie.width(depth, num_beams) for depth in range(1, self.step.levels + 1)]

    def tree(self, nodes: int) -> TokenTree:
        """A tree with room for `nodes` nodes a request, and for those of the candidates."""
        extra = 0 if self.rows is None else self.rows.width
        return TokenTree(self.model, self.prompts, nodes + extra)

    def send(self) -> None:
        """Copy what the search needs to the device; a `TokenTree` does so when it is entered."""
        self.prompts.upload.send()

    def take(self, requests: torch.Tensor) -> Search:
        """Some of the requests, without their candidates; (b,) int64 places."""
        self.send()
        return Search(self.model, self.prompts.take(requests.tolist()), self.step.take(requests))


def check_vocabulary(model: TreeModel, trie: DeviceTrie) -> None:
    """Raise ValueError unless the model knows every token of the catalog."""
    if (last := int(trie.source.alphabet[-1])) >= model.vocabulary_size:
        raise ValueError(
            f"the catalog has token {last}; the model knows 0 .. {model.vocabulary_size - 1}"
        )


def _step(request: SearchRequest, upload: Upload, trie: DeviceTrie) -> Step:
    """The constraints of a request as tensors on the device of `upload`."""
    for name, values in (("masks", request.masks), ("boosts", request.boosts)):
        for i, value in enumerate(values or ()):
            if value is not None and value.trie is not trie.source:
                raise ValueError(f"{name}: that of request {i} is made for another trie")
    source = trie.source
    excluded = noise = None
    if request.exclude is not None:
        rows = arguments.rows_of_requests("exclude", request.exclude, len(request), source.num_rows)
        excluded = Excluded.of(source, upload, rows, request.masks)
    if request.seeds is not None:
        seeds = np.asarray(request.seeds, np.int64)
        noise = Noise(upload.add(seeds), float(request.temperature))
    return Step(
        trie,
        excluded,
        request.normalize,
        noise=noise,
        allowed=None if request.masks is None else Allowed.of(source, upload, request.masks),
        gains=None if request.boosts is None else Gains.of(source, upload, request.boosts),
    )
