"""What every search over a catalog promises; a search or a drafter gets these tests by a subclass.

The expected answers are those of plain Python: every sequence of the catalog is scored by one plain
forward, and beams are sorted lists of prefixes.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import random_catalog, random_prompts, tiny_model

from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.mask import RowMask
from recsys.decoding import SearchRequest, beam_search, speculative_beam_search
from recsys.errors import NonFiniteError
from recsys.models.tree_forward import TreeModel

TARGET = tiny_model("llama-gqa", dtype=torch.float64)
BROKEN = 63  # a token that only prompts have

Row = tuple[int, ...]


@dataclass
class Case:
    """A catalog, and requests with what they may get.

    Attributes:
        items: (items, L) tokens.
        prompts: the batch.
        allowed: of each request (items,) bools, or None.
        excluded: rows of each request.
        gains: of each request (items,) boosts, or None.
        candidates: rows of each request whose scores are asked for; None asks for none.
        normalize: "vocabulary" or "allowed".
    """

    items: Any
    prompts: list[np.ndarray]
    allowed: list[np.ndarray | None]
    excluded: list[np.ndarray]
    gains: list[np.ndarray | None]
    candidates: list[np.ndarray] | None
    normalize: str

    def __post_init__(self) -> None:
        self.trie = ItemTrie.build(self.items)
        self.rows = [tuple(map(int, row)) for row in self.trie.rows]

    def fields(self) -> bytes:
        """All that it was made of."""
        return pickle.dumps([getattr(self, field.name) for field in fields(self)])

    @property
    def request(self) -> SearchRequest:
        """The same for a search."""
        place = self.trie.row_items
        return SearchRequest(
            self.prompts,
            exclude=self.excluded,
            masks=[None if a is None else RowMask.of(self.trie, a[place]) for a in self.allowed],
            boosts=[None if g is None else Boost.of(self.trie, g[place]) for g in self.gains],
            candidates=self.candidates,
            normalize=self.normalize,
        )

    @torch.inference_mode()
    def logits(self, model: Any, request: int) -> dict[Row, torch.Tensor]:
        """Logits behind every proper prefix of the catalog, by one plain forward of all rows."""
        prompt = torch.as_tensor(self.prompts[request])
        rows = torch.tensor(self.rows)
        whole = torch.cat([prompt.expand(len(rows), -1), rows], dim=1)
        found = model(whole).logits[:, len(prompt) - 1 : -1].double()
        return {row[:d]: found[r, d] for r, row in enumerate(self.rows) for d in range(len(row))}

    def holders(self, request: int) -> list[Row]:
        """Rows that the request may get."""
        allowed = self.allowed[request]
        gone = set(self.excluded[request].tolist())
        return [
            row
            for number, row in enumerate(self.rows)
            if number not in gone and (allowed is None or allowed[self.trie.items_of(number)].any())
        ]

    def gains_of(self, request: int) -> dict[Row, float]:
        """The largest boost below each prefix, whether it may be listed or not."""
        gains, found = self.gains[request], {}
        for number, row in enumerate(self.rows):
            here = 0.0 if gains is None else float(gains[self.trie.items_of(number)].max())
            for depth in range(len(row) + 1):
                found[row[:depth]] = max(here, found.get(row[:depth], here))
        return found


class Expected:
    """The right answer of one request of a case."""

    def __init__(self, case: Case, model: Any, request: int) -> None:
        self.case, self.rows, self.gains = case, case.holders(request), case.gains_of(request)
        logits = case.logits(model, request)
        self.log_probs: dict[Row, float] = {(): 0.0}
        prefixes = sorted({row[:d] for row in case.rows for d in range(1, len(row) + 1)}, key=len)
        for prefix in prefixes:
            before, token = prefix[:-1], prefix[-1]
            values = logits[before]
            among = slice(None)
            if case.normalize == "allowed":
                among = sorted({row[len(before)] for row in self.rows
                                if row[: len(before)] == before} | {token})  # fmt: skip
            step = float(values[token] - values[among].logsumexp(-1))
            self.log_probs[prefix] = self.log_probs[before] + step

    def worth(self, prefix: Row) -> float:
        return self.log_probs[prefix] + self.gains[prefix]

    def beams(self, num_beams: int) -> tuple[list[Row], str]:
        """What beam search lists, best first, and its certificate.

        The list is proven to be the best of all if each pruned prefix is worth less than its last.
        """
        kept, pruned = [()], -math.inf
        for depth in range(1, self.case.trie.num_levels + 1):
            above = set(kept)
            found = sorted({row[:depth] for row in self.rows if row[: depth - 1] in above})
            ranked = sorted(found, key=lambda prefix: -self.worth(prefix))
            kept = ranked[:num_beams]
            if depth < self.case.trie.num_levels:
                pruned = max([pruned, *map(self.worth, ranked[num_beams:])])
        last = self.worth(kept[-1]) if len(kept) == num_beams else -math.inf
        proven = pruned < last or pruned == -math.inf
        return kept, "global-exact" if proven else "beam-exact"

    def best(self, num_beams: int) -> list[Row]:
        """The best of all rows."""
        return sorted(self.rows, key=lambda row: -self.worth(row))[:num_beams]


@lru_cache(1024)
def expected_of(made_of: bytes, request: int) -> Expected:
    """The right answer of a request of `Case.fields`; every search gets the same cases."""
    return Expected(Case(*pickle.loads(made_of)), TARGET, request)


def thin(rng: np.random.Generator, items: int, levels: int) -> np.ndarray:
    """Sequences that part at a few levels only, so that most states have an only child."""
    codes = rng.integers(1, 60, (items, levels))
    for level in np.flatnonzero(rng.random(levels) < 0.6):
        # a token that follows from those before it
        codes[:, level] = 1 + (codes[:, :level].sum(1) * 7 + level) % 59
    return codes


@st.composite
def cases(draw: Any, *, normalizes: tuple[str, ...] = ("vocabulary", "allowed")) -> Case:
    """Catalogs of any form, and batches with any mixture of restrictions."""
    rng = np.random.default_rng(draw(st.integers(0, 100_000)))
    items, levels = draw(st.sampled_from([1, 7, 40, 120, 300])), draw(st.integers(1, 5))
    catalog: Any = (
        thin(rng, items, levels) if draw(st.booleans()) else random_catalog(rng, items, levels, 60)
    )
    trie = ItemTrie.build(catalog)
    prompts = random_prompts(rng, draw(st.integers(1, 4)), 12)
    if len(prompts) > 2:
        prompts[2] = prompts[0]
    share = draw(st.sampled_from([None, None, 0.0, 0.05, 0.5, 1.0]))
    excluded = draw(st.sampled_from([0.0, 0.0, 0.1, 0.8, 1.0]))
    strength = draw(st.sampled_from([None, None, 0.5, 5.0]))
    normalize = draw(st.sampled_from(normalizes))
    candidates = None
    if normalize == "vocabulary" and draw(st.booleans()):
        candidates = [rng.integers(0, trie.num_rows, rng.integers(0, 12)) for _ in prompts]
    none = [None] * len(prompts)
    return Case(
        catalog,
        prompts,
        none if share is None else [
            rng.random(items) < share if rng.random() < 0.8 else None for _ in prompts
        ],
        [np.flatnonzero(rng.random(trie.num_rows) < excluded * rng.random()) for _ in prompts],
        none if strength is None else [
            (strength * rng.normal(size=items)).astype(np.float32) if rng.random() < 0.8 else None
            for _ in prompts
        ],
        candidates,
        normalize,
    )  # fmt: skip


CATALOG = random_catalog(np.random.default_rng(0), 60, 4, 60)
CLEAN = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 5], [9, 8, 7, 6, 5, 4, 3]]
MIXED = [CLEAN[0], [7, 7, BROKEN, 5, 6], CLEAN[1], [BROKEN], CLEAN[2]]


def broken_model(tokens: Any, value: float = math.nan, dtype: torch.dtype = torch.float64) -> Any:
    """A model in which these tokens make all that follows them NaN or infinite."""
    model = tiny_model("llama", 64, seed=3, dtype=dtype)
    with torch.no_grad():
        model.model.embed_tokens.weight[tokens] = value
    return model


def beside_beams(bad: int) -> tuple[ItemTrie, SearchRequest, list[int]]:
    """A catalog whose rows with a bad token are excluded, a request, and the other rows."""
    good = [[2, 3, 4], [2, 3, 5], [7, 3, 4]]
    rows = sorted([*good, *([bad, 3, 4 + i] for i in range(3)), [2, bad, 4], [7, 3, bad]])
    exclude = [[i for i, row in enumerate(rows) if row not in good]] * 2
    request = SearchRequest([[2, 3], [4, 5, 6, 7]], exclude=exclude)
    return ItemTrie.build(rows), request, sorted(i for i, r in enumerate(rows) if r in good)


class SearchSuite:
    """Tests of one way to search.

    A subclass has `search`, and says in `normalizes` over what it takes log-probabilities. Its
    answers are beam search's, or those of an exhaustive search if it is `complete`; it has a pass a
    level if it is `level_by_level`.
    """

    normalizes: tuple[str, ...] = ("vocabulary", "allowed")
    complete = False
    level_by_level = False

    def search(self, model: Any, request: Any, trie: ItemTrie, num_beams: int) -> Any:
        """The answer of the search under test, a `Beams`."""
        raise NotImplementedError

    @given(data=st.data(), num_beams=st.sampled_from([1, 2, 3, 5, 9, 22]))
    @settings(max_examples=30, deadline=None)
    def test_answers_are_those_of_plain_python(self, data: Any, num_beams: int) -> None:
        case = data.draw(cases(normalizes=self.normalizes))
        found = self.search(TARGET, case.request, case.trie, num_beams)
        for i in range(len(case.prompts)):
            right = expected_of(case.fields(), i)
            listed, certificate = right.beams(num_beams)
            if self.complete:
                listed, certificate = right.best(num_beams), "global-exact"
            assert found.certificates[i] == certificate
            missing = num_beams - len(listed)
            numbers = [case.rows.index(row) for row in listed]
            assert found.rows[i].tolist() == numbers + [-1] * missing
            assert [tuple(t) for t in found.tokens[i].tolist()][: len(listed)] == listed
            scores = [right.log_probs[row] for row in listed] + [-math.inf] * missing
            assert found.scores[i].tolist() == pytest.approx(scores, abs=1e-6)
            stats = found.stats[i]
            assert self.complete or stats.target_passes <= case.trie.num_levels
            if self.level_by_level:
                assert stats.target_passes == case.trie.num_levels
            if case.candidates is not None:
                asked = [right.log_probs[case.rows[r]] for r in case.candidates[i]]
                line = found.candidate_scores[i].tolist()
                asked += [-math.inf] * (len(line) - len(asked))
                assert line == pytest.approx(asked, abs=1e-6)

    def test_an_empty_batch_has_an_empty_answer(self) -> None:
        found = self.search(TARGET, SearchRequest([]), ItemTrie.build(CATALOG), 5)
        assert found.rows.shape == (0, 5)
        assert found.tokens.shape == (0, 5, 4)

    def test_beams_beyond_the_catalog_cost_no_memory(self) -> None:
        """100,000 beams over four rows once asked for 40 GB."""
        trie = ItemTrie.build([[1, 2, 3], [1, 2, 4], [1, 5, 3], [6, 2, 3]])
        found = self.search(TARGET, SearchRequest([[1, 2]]), trie, 100_000)
        assert sorted(found.rows[0, :4].tolist()) == [0, 1, 2, 3]
        assert (found.rows[0, 4:] == -1).all()

    def test_equal_scores_are_ordered_by_row(self) -> None:
        model = tiny_model("llama", dtype=torch.float64)
        torch.nn.init.zeros_(model.lm_head.weight)  # every token is as likely as any other
        trie = ItemTrie.build([[9, 2], [3, 4], [3, 1], [7, 7]])
        found = self.search(model, SearchRequest([[1]]), trie, 3)
        assert found.tokens[0].tolist() == [[3, 1], [3, 4], [7, 7]]
        assert found.scores[0].tolist() == pytest.approx([-2 * math.log(64)] * 3)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_errors_name_requests_that_are_not_finite_and_others_are_answered(
        self, value: float
    ) -> None:
        """One such history once left keys behind that made later answers empty and certified."""
        trie = ItemTrie.build(CATALOG)
        expected = self.search(TreeModel(broken_model(BROKEN, value)), CLEAN, trie, 8)
        tree = TreeModel(broken_model(BROKEN, value))
        for _ in range(2):
            with pytest.raises(NonFiniteError, match="not finite for request 1, 3") as caught:
                self.search(tree, MIXED, trie, 8)
            assert caught.value.requests == (1, 3)
            found = self.search(tree, CLEAN, trie, 8)
            assert torch.equal(found.rows, expected.rows)
            assert torch.equal(found.scores, expected.scores)
        assert tree.pool.lent == 0

    @pytest.mark.parametrize("bad", [0, 1, 9])
    def test_tokens_outside_all_beams_are_never_run(self, bad: int) -> None:
        """Places without a beam once ran another token, whose keys could break the request."""
        trie, request, expected = beside_beams(bad)
        found = self.search(broken_model(bad), request, trie, 8)
        for line in found.rows.tolist():
            assert sorted(line) == [-1] * 5 + expected


class DrafterSuite(SearchSuite):
    """Tests of one drafter: whatever it drafts, strict verification answers as beam search.

    A subclass has `drafter`.
    """

    patch_nodes = 128

    def drafter(self, model: Any, trie: ItemTrie, batch: int) -> Any:
        """The drafter under test, for a batch of this size."""
        raise NotImplementedError

    def search(self, model: Any, request: Any, trie: ItemTrie, num_beams: int) -> Any:
        batch = len(request.prompts if isinstance(request, SearchRequest) else request)
        return speculative_beam_search(
            model, self.drafter(model, trie, batch), request, trie, num_beams,
            patch_nodes=self.patch_nodes,
        )  # fmt: skip

    @given(data=st.data(), num_beams=st.integers(1, 12), heat=st.sampled_from([0.3, 1.0, 2.5]))
    @settings(max_examples=12, deadline=None)
    def test_samples_are_those_of_beam_search(self, data: Any, num_beams: int, heat: float) -> None:
        case = data.draw(cases(normalizes=("vocabulary",)))
        request = SearchRequest(
            case.prompts, exclude=case.excluded, masks=case.request.masks,
            seeds=range(-2, len(case.prompts) - 2), temperature=heat,
        )  # fmt: skip
        expected = beam_search(TARGET, request, case.trie, num_beams)
        found = self.search(TARGET, request, case.trie, num_beams)
        assert torch.equal(found.rows, expected.rows)
        torch.testing.assert_close(found.scores, expected.scores, atol=1e-6, rtol=0)
        assert all(1 <= stats.target_passes <= case.trie.num_levels for stats in found.stats)
