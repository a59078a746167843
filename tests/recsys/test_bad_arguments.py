"""What a caller can get wrong is refused in words, before any work."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from oracles import tiny_model

from recsys.constraint import ItemTrie
from recsys.constraint.attributes import Attributes
from recsys.constraint.boost import Boost
from recsys.constraint.filters import ItemFilter
from recsys.constraint.mask import RowMask
from recsys.decoding import (
    Engine,
    ModelDrafter,
    SearchRequest,
    beam_search,
    complete,
    score_rows,
    speculative_beam_search,
)
from recsys.requests import RecommendRequest

ROWS = np.array([[1, 2, 3], [1, 2, 4], [1, 5, 3], [6, 2, 3]])
TRIE, OTHER = ItemTrie.build(ROWS), ItemTrie.build(ROWS)
MODEL = tiny_model("llama", 16)


def plain(**options):
    beams = options.pop("num_beams", 2)
    request = SearchRequest(options.pop("prompts", [[1, 2]]), **options)
    return beam_search(MODEL, request, TRIE, beams)


def strict(**options):
    beams, patch = options.pop("num_beams", 2), options.pop("patch_nodes", 9)
    request = SearchRequest(options.pop("prompts", [[1, 2]]), **options)
    return speculative_beam_search(MODEL, None, request, TRIE, beams, patch_nodes=patch)


BAD = [
    ({"num_beams": 0}, "num_beams must be at least 1, got 0"),
    ({"num_beams": 2.5}, "num_beams must be a whole number, got 2.5"),
    ({"num_beams": 10**9}, "num_beams must be at most 1000000, got 1000000000"),
    ({"candidate_nodes": 10**7, "candidates": [[0]]}, "candidate_nodes must be at most 16384"),
    ({"prompt_slots": 10**7}, "prompt_slots must be at most 1000000"),
    ({"temperature": 1e-300, "seeds": [1]}, "temperature must be finite and at least 0.0001"),
    ({"temperature": float("nan"), "seeds": [1]}, "temperature must be finite"),
    ({"exclude": [[99]]}, r"exclude of request 0 has row 99; rows lie in 0 \.\. 3"),
    ({"exclude": [[1.5]]}, "exclude of request 0 must hold integers, got float64"),
    ({"exclude": [[1], [2]]}, "exclude has 2 entries for 1 prompts"),
    ({"prompts": [[1.0, 2.0]]}, "prompt 0 must hold integers, got float64"),
    ({"prompts": [[]]}, "prompt 0 is empty"),
    ({"prompts": [1, 2]}, "prompt 0 must be a flat list of integers, got 1"),
    ({"prompts": [[[1, 2]]]}, r"prompt 0 must be a flat list of integers, got \[\[1, 2\]\]"),
    ({"exclude": [1]}, "exclude of request 0 must be a flat list of integers, got 1"),
    ({"exclude": 1}, "exclude must be a list with one entry per prompt, got 1"),
    ({"seeds": 1}, "seeds must be a list with one entry per prompt, got 1"),
    ({"candidate_nodes": -1, "candidates": [[0]]}, "candidate_nodes must be at least 0, got -1"),
    ({"prompts": [[16]]}, r"prompt 0 has token 16 at place 0; the model knows 0 \.\. 15"),
    ({"seeds": [1.5]}, "seeds must hold integers, got float64"),
    ({"seeds": [1, 2]}, "seeds has 2 entries for 1 prompts"),
    ({"seeds": [2**64 - 1]}, "the largest integer is 2\\^63 - 1"),
    ({"masks": []}, "masks has 0 entries for 1 prompts"),
    (
        {"masks": [RowMask.of(OTHER, np.ones(4, np.bool_))]},
        "masks: that of request 0 is made for another trie",
    ),
    (
        {"boosts": [Boost.of(OTHER, np.ones(4, np.float32))]},
        "boosts: that of request 0 is made for another trie",
    ),
    ({"candidates": [[0], [1]]}, "candidates has 2 entries for 1 prompts"),
    ({"candidates": [[4]]}, r"candidates of request 0 has row 4; rows lie in 0 \.\. 3"),
    ({"normalize": "all"}, "normalize 'all' is neither 'vocabulary' nor 'allowed'"),
    ({"candidates": [[0]], "seeds": [1]}, "candidates: .* in no sample"),
    ({"candidates": [[0]], "normalize": "allowed"}, "candidates: scored over the whole vocabulary"),
    ({"boosts": [Boost.of(TRIE, np.zeros(4, np.float32))], "seeds": [0]}, "boosts: a sample"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_errors_of_a_search_name_the_argument(options, message):
    with pytest.raises(ValueError, match=message):
        plain(**options)


COLLIDING = ItemTrie.build([[1, 2, 3], [1, 2, 3], [1, 2, 4], [5, 2, 4]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ModelDrafter(MODEL, 2.5), "nodes must be a whole number, got 2.5"),
        (lambda: ModelDrafter(MODEL, widths=[3, 0]), "widths must be at least 1, got 0"),
        (lambda: ModelDrafter(MODEL, 0), "nodes must be at least 1, got 0"),
        (lambda: strict(patch_nodes=1.5), "patch_nodes must be a whole number"),
        (lambda: strict(patch_nodes=0), "patch_nodes must be at least 1, got 0"),
        (lambda: score_rows(MODEL, [[1]], TRIE, [[0.5]]), "rows of request 0 must hold integers"),
        (lambda: score_rows(MODEL, [[1]], TRIE, [[0], [1]]), "rows has 2 entries for 1 prompts"),
        (
            lambda: complete(MODEL, plain(num_beams=1), [[1], [2]], TRIE),
            "beams of 1 requests for 2 prompts",
        ),
        (
            lambda: complete(MODEL, plain(seeds=[1]), [[1, 2]], TRIE),
            "only an exact search can be completed",
        ),
        (
            lambda: Engine(MODEL, TRIE).captures.capture_passes(0, 4, 2, []),
            "batch must be at least 1, got 0",
        ),
        (
            lambda: Engine(MODEL, TRIE).captures.capture_decodes(1.5, 4, 2),
            "batch must be a whole number",
        ),
        (
            lambda: Engine(MODEL, TRIE).captures.capture_decodes(1, 4, 0),
            "num_beams must be at least 1",
        ),
        (lambda: Engine(MODEL.model, TRIE), "LlamaModel has no LM head; load the model with"),
        (lambda: RecommendRequest([], k=2.5), "k must be a whole number, got 2.5"),
        (lambda: RecommendRequest([], k=0), "k must be at least 1, got 0"),
        (
            lambda: RecommendRequest([], guarantee="best"),
            "guarantee: Input should be 'beam' or 'global', found 'best'",
        ),
        (lambda: RecommendRequest([], seed=1, guarantee="global"), "a seed asks for a sample"),
        (lambda: RecommendRequest([], seed=1, blend=True), "blend: a seed draws from the model"),
        (
            lambda: RecommendRequest([], seed=1.5),
            "seed: Input should be a valid integer.*found 1.5",
        ),
        (lambda: RecommendRequest([], temperature=1e-300), "temperature: .* to 0.01, found"),
        (lambda: RowMask.of(COLLIDING, np.array([0, 0, 1, 1])), r"a mask is \(4,\) bool"),
        (lambda: RowMask.of(COLLIDING, np.array([True])), r"a mask is \(4,\) bool"),
        (lambda: RowMask.of(COLLIDING, "x"), r"a mask is \(4,\) bool"),
        (lambda: Boost.of(COLLIDING, np.ones(5, np.float32)), r"a boost is \(4,\) numbers"),
        (lambda: Boost.of(COLLIDING, np.full(4, 1e9)), "boosts must be finite and lie in"),
        (lambda: Boost.of(COLLIDING, np.full(4, np.nan)), "boosts must be finite and lie in"),
        (lambda: COLLIDING.excluded_rows(np.array([True, False])), "items must hold integers"),
        (lambda: COLLIDING.excluded_rows([-1]), r"items has item -1; items lie in 0 \.\. 3"),
        (lambda: COLLIDING.excluded_rows([4]), "items has item 4"),
        (lambda: plain(exclude={0: [1]}), "exclude must be a list with one entry per prompt"),
        (lambda: plain(masks=["x"]), "masks: that of request 0 is a str, not a RowMask"),
        (
            lambda: plain(boosts=[RowMask.of(TRIE, np.ones(4, np.bool_))]),
            "boosts: that of request 0 is a RowMask, not a Boost",
        ),
        (lambda: RecommendRequest(["a"], exclude_items="i73"), "exclude_items must be a list"),
        (lambda: RecommendRequest("a"), "history must be a list of strings, got 'a'"),
        (lambda: RecommendRequest(["a"], exclude_items=[5]), "exclude_items must be a list"),
        (lambda: RecommendRequest(["a"], k=10**9), "k must be at most 1000000"),
        (
            lambda: complete(MODEL, beam_search(MODEL, [[1]], COLLIDING, 2), [[1]], TRIE),
            "beams: found over another trie",
        ),
        (lambda: beam_search(tiny_model("llama", 16).train(), [[1]], TRIE), "call model.eval()"),
        (lambda: Engine(MODEL, TRIE).warm_up([[1]], batches=()), "batches: want at least one"),
        (
            lambda: Engine(MODEL, TRIE).decode([[1]], mode="fast"),
            "mode 'fast' is not one of auto, planned, beam, strict, exhaustive, draft",
        ),
        (
            lambda: Engine(MODEL, TRIE).decode(SearchRequest([[1]], seeds=[1]), until_global=True),
            "drawn from all sequences already",
        ),
    ],
)
def test_errors_of_other_calls_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("search", [plain, strict])
def test_numpy_integers_and_empty_lists_are_accepted(search):
    found = search(num_beams=np.int64(2), exclude=[[]], prompts=[np.array([1, 2], np.uint8)])
    assert torch.equal(found.rows, plain().rows)


def test_a_relaxed_search_takes_empty_batches_and_more_beams_than_rows():
    def relaxed(prompts, beams):
        request = SearchRequest(prompts, seeds=[1] * len(prompts))
        return speculative_beam_search(MODEL, MODEL, request, TRIE, beams, "relaxed").rows

    assert relaxed([], 5).shape == (0, 5)
    (rows,) = relaxed([[1, 2]], 100_000).tolist()
    assert sorted(rows[:4]) == [0, 1, 2, 3]
    assert set(rows[4:]) == {-1}


def test_whole_numbers_of_a_filter_are_compared_exactly():
    for kind, big in ((pa.int64(), 10**16), (pa.uint64(), 2**53), (pa.int64(), 2**62)):
        values = [big - 1, big, big + 1, None]
        column = Attributes(pa.table({"n": pa.array(values, kind)}), np.arange(4))
        for test, expected in (
            ({"match": big + 1}, [2]),
            ({"match": float(big)}, [1]),
            ({"any": [float(big), 1, 2, 3, 4, 5]}, [1]),
            ({"range": {"gt": big}}, [2]),
            ({"range": {"gt": float(big)}}, [2]),
            ({"range": {"lte": big}}, [0, 1]),
        ):
            wanted = ItemFilter.parse({"must": [{"key": "n", **test}]})
            assert np.flatnonzero(wanted.evaluate(column)).tolist() == expected, (kind, test)
