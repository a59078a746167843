"""Relaxed verification: exact at N = K = 1, and elsewhere what the algorithm says."""

import functools
import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import random_catalog, random_prompts, tiny_model
from scipy.stats import chisquare

from recsys.constraint import ItemTrie
from recsys.decoding import ModelDrafter, SearchRequest, beam_search, speculative_beam_search
from recsys.decoding.relaxed import settle
from recsys.decoding.sampling import Noise

TARGET = tiny_model("llama-gqa", hidden=16, layers=1, dtype=torch.float64)
# finds likely what the target finds unlikely
ADVERSARY = tiny_model("llama-gqa", hidden=16, layers=1, dtype=torch.float64)
ADVERSARY.lm_head.weight.data.neg_()
CLOSE = tiny_model("llama-gqa", hidden=16, layers=1, dtype=torch.float64)
CLOSE.lm_head.weight.data.mul_(0.7)
DRAFTS = {
    "perfect": TARGET,
    "close": CLOSE,
    "unrelated": tiny_model("llama", hidden=16, layers=1, seed=9, dtype=torch.float64),
    "adversary": ADVERSARY,
}
UNLIKELY = 1e-3
PROMPT = np.array([3, 1, 4])
SMALL = [(1, 2, 3), (1, 2, 4), (1, 5, 3), (2, 2, 2), (2, 6, 2), (2, 6, 5), (7, 1, 1)]


def relaxed(
    draft, prompts, trie, beams, *, draft_beams=None, traced=False, released=False, **options
):
    if draft_beams is not None:
        draft = ModelDrafter(draft, draft_beams=draft_beams)
    request = SearchRequest(prompts, **options)
    return speculative_beam_search(
        TARGET, draft, request, trie, beams, "relaxed", traced=traced, released=released
    )


def draw(draft, count, beams, temperature, **options):
    """(count, beams) rows of SMALL, each with a seed of its own."""
    options |= {"temperature": temperature, "seeds": range(count)}
    return relaxed(draft, [PROMPT] * count, ItemTrie.build(np.array(SMALL)), beams, **options).rows


@functools.cache
def conditional(model, prefix, temperature):
    """Probabilities of the tokens that may follow a prefix in SMALL."""
    tokens = sorted({row[len(prefix)] for row in SMALL if row[: len(prefix)] == prefix})
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT.tolist(), *prefix]])).logits[0, -1]
    return dict(zip(tokens, (logits[tokens] / temperature).softmax(-1).tolist(), strict=True))


@functools.cache
def released_weight(model, prefix, temperature):
    """Weights of these tokens in the released code: nothing is normalised at the node."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT.tolist(), *prefix]])).logits[0, -1]
    whole = logits.log_softmax(-1)
    return {y: math.exp(whole[y] / temperature) for y in conditional(model, prefix, temperature)}


def agrees(counts, law):
    """Chi-square, the cells that are too rare for it counted together."""
    total = sum(counts.values())
    table = np.array([[counts[cell], total * p] for cell, p in law.items()])
    rare = table[:, 1] < 8
    table = np.vstack([table[~rare], table[rare].sum(0)]) if rare.any() else table
    assert table[:, 0].sum() == total
    return chisquare(table[:, 0], table[:, 1]).pvalue > UNLIKELY


@pytest.mark.parametrize(
    ("draft", "temperature"),
    [("perfect", 3.0), ("close", 3.0), ("unrelated", 1.0), ("unrelated", 3.0), ("adversary", 3.0)],
)
def test_one_beam_and_one_draft_sample_the_target_exactly(draft, temperature):
    law = {}
    for i, row in enumerate(SMALL):
        steps = (conditional(TARGET, row[:d], temperature)[row[d]] for d in range(3))
        law[i] = math.prod(steps)
    drawn = draw(DRAFTS[draft], 8_000, 1, temperature)[:, 0].tolist()
    assert agrees(Counter(drawn), law)


# The law of the whole algorithm at N = K, by enumeration.


def samples(weights, count):
    """Probability of each ordered sample without replacement; all there is where it is less."""
    found = {}
    cells = [cell for cell, weight in weights.items() if weight > 0]
    for sample in itertools.permutations(cells, min(count, len(cells))):
        left, probability = math.fsum(weights[c] for c in cells), 1.0
        for cell in sample:
            probability *= weights[cell] / left
            left -= weights[cell]
        found[sample] = probability
    return found


# The released form, at any N, by enumeration.


def released_law(draft, beams, drafted, count, drafts, temperature):
    """Probability of each set of leaves.

    `beams` are the accepted prefixes with their p, `drafted` those that the draft goes on from,
    with their q.
    """
    depth = len(next(iter(beams)))
    p, q = {}, {}
    for model, above, here in ((TARGET, beams, p), (draft, drafted, q)):
        for prefix, weight in above.items():
            for token, chance in released_weight(model, prefix, temperature).items():
                here[(*prefix, token)] = weight * chance
        total = math.fsum(here.values())
        here.update({y: w / total for y, w in here.items()})
    law = defaultdict(float)
    if depth == 2:
        for sample, probability in samples(p, count).items():
            law[frozenset(sample)] += probability
        return law

    def go_on(chosen, below, chance):
        following = released_law(
            draft, {y: p[y] for y in chosen}, below, count, drafts, temperature
        )
        for leaves, probability in following.items():
            law[leaves] += chance * probability

    for sample, probability in samples(q, drafts).items():
        tested = [y for y in sample if y in p]
        for verdict in itertools.product([True, False], repeat=len(tested)):
            chances = [min(1.0, p[y] / q[y]) for y in tested]
            here = probability * math.prod(
                c if yes else 1 - c for c, yes in zip(chances, verdict, strict=True)
            )
            if not here:
                continue
            accepted = [y for y, yes in zip(tested, verdict, strict=True) if yes]
            wanted = min(count, len(p))
            if len(accepted) >= wanted:
                choices = list(itertools.combinations(accepted, wanted))
                for chosen in choices:
                    go_on(chosen, {y: q[y] for y in sample}, here / len(choices))
                continue
            missing = wanted - len(accepted)
            rest = {y: max(0.0, p[y] - q.get(y, 0.0)) for y in p if y not in accepted}
            for first, chance in samples(rest, missing).items():
                others = {y: p[y] for y in p if y not in (*accepted, *first)}
                for second, last in samples(others, missing - len(first)).items():
                    chosen = (*accepted, *first, *second)
                    go_on(chosen, {y: p[y] for y in chosen}, here * chance * last)
    return law


@pytest.mark.parametrize(
    ("draft", "beams", "drafts"), [("unrelated", 2, 2), ("unrelated", 2, 3), ("close", 1, 2)]
)
def test_released_samples_follow_the_released_algorithm(draft, beams, drafts):
    law = released_law(DRAFTS[draft], {(): 1.0}, {(): 1.0}, beams, drafts, 3.0)
    assert math.isclose(math.fsum(law.values()), 1)
    drawn = draw(DRAFTS[draft], 8_000, beams, 3.0, draft_beams=drafts, released=True).tolist()
    assert agrees(Counter(frozenset(SMALL[row] for row in rows) for rows in drawn), law)


def test_a_released_level_needs_k_accepted_children():
    # Both children were drawn; the draft overrates the second, which is rejected and filled again.
    p, q = torch.tensor([[0.99, 0.01]]).log(), torch.tensor([[0.01, 0.99]]).log()
    drawn, states = torch.tensor([[True, True]]), torch.tensor([[1, 2]])
    seeds = range(100)
    rejected = 0
    for seed in seeds:
        noise = Noise(torch.tensor([seed]))
        place, known = settle(p, q, drawn, states, noise, 2)
        again, released = settle(p, q, drawn, states, noise, 2, torch.zeros(1).double())
        assert place.tolist() == again.tolist() == [[0, 1]]
        assert known, "both beams had been drawn"
        rejected += not released
    assert rejected > 90


def slow_settle(log_p, log_q, drawn, states, noise, count, mass=None):
    """One request of `settle`, one child at a time."""
    log_p, log_q = ([float(x) for x in line] for line in (log_p, log_q))
    alive = [i for i, x in enumerate(log_p) if x > -math.inf]
    total = [math.fsum(math.exp(line[i]) for i in alive) for line in (log_p, log_q)]
    p = {i: math.exp(log_p[i]) / total[0] for i in alive}
    if mass is not None:
        total[1] = math.exp(mass)
    q = {i: math.exp(log_q[i]) / total[1] for i in alive}
    uniform = noise.stream(1).uniform(states).tolist()[0]
    gumbel = noise.stream(2).gumbel(states).tolist()[0]
    accepted = [i for i in alive if drawn[i] and uniform[i] <= p[i] / q[i]]
    chosen = sorted(accepted, key=lambda i: -gumbel[i])[:count]
    weights = [{i: p[i] - q[i] for i in alive if p[i] > q[i]}, p]
    while len(chosen) < min(count, len(alive)):
        for weight in weights:
            left = {i: math.log(w) + gumbel[i] for i, w in weight.items() if i not in chosen}
            if left:
                chosen.append(max(left, key=left.get))
                break
    if mass is not None:
        return sorted(chosen), len(accepted) >= min(count, len(alive))
    return sorted(chosen), all(drawn[i] for i in chosen)


@given(
    seed=st.integers(0, 100_000),
    released=st.booleans(),
    children=st.integers(1, 30),
    count=st.integers(1, 12),
    drafts=st.integers(0, 20),
    gap=st.sampled_from([0.0, 0.5, 5.0]),
    dead=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
)
@settings(max_examples=150, deadline=None)
def test_settling_a_level_equals_a_slow_reference(
    seed, released, children, count, drafts, gap, dead
):
    rng = np.random.default_rng(seed)
    count = min(count, children)
    log_p = rng.normal(size=(3, children)) * 2
    log_q = log_p + rng.normal(size=(3, children)) * gap
    gone = rng.random((3, children)) < dead
    log_p[gone] = log_q[gone] = -math.inf
    drawn = ~gone & (rng.random((3, children)) < drafts / children)
    states = torch.from_numpy(rng.integers(0, 2**40, (3, children)))
    noise = Noise(torch.from_numpy(rng.integers(-(2**62), 2**62, 3)))
    log_p, log_q, drawn = map(torch.from_numpy, (log_p, log_q, drawn))
    # Beams that were not accepted have children, too.
    mass = log_q.logsumexp(1) + torch.from_numpy(rng.random(3)) if released else None
    place, known = settle(log_p, log_q, drawn, states, noise, count, mass)
    for i in range(3):
        expected, goes_on = slow_settle(
            log_p[i], log_q[i], drawn[i], states[i : i + 1], noise.take(torch.tensor([i])), count,
            None if mass is None else float(mass[i]),
        )  # fmt: skip
        assert place[i].tolist() == expected + [children] * (count - len(expected))
        assert known[i] == goes_on


@given(
    seed=st.integers(0, 100_000),
    draft=st.sampled_from(list(DRAFTS)),
    items=st.sampled_from([1, 2, 7, 40, 300]),
    levels=st.integers(1, 5),
    beams=st.integers(1, 22),
    more=st.sampled_from([0, 1, 30]),
    batch=st.integers(1, 4),
    excluded=st.sampled_from([0.0, 0.1, 0.8, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    released=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_samples_are_distinct_allowed_and_scored_by_the_target(
    seed, draft, items, levels, beams, more, batch, excluded, temperature, released
):
    rng = np.random.default_rng(seed)
    trie = ItemTrie.build(random_catalog(rng, items, levels))
    prompts = random_prompts(rng, batch, 6)
    seeds = rng.integers(-(2**63), 2**63 - 1, batch).tolist()
    exclude = [
        trie.excluded_rows(np.flatnonzero(rng.random(items) < excluded)) for _ in range(batch)
    ]
    options = {"draft_beams": beams + more, "temperature": temperature, "released": released}
    found = relaxed(DRAFTS[draft], prompts, trie, beams, seeds=seeds, exclude=exclude, **options)
    request = SearchRequest(prompts, seeds=seeds, exclude=exclude, temperature=temperature)
    if released:
        request = SearchRequest(prompts, exclude=exclude)
    everything = beam_search(TARGET, request, trie, trie.num_rows)
    for i, prompt in enumerate(prompts):
        rows = [row for row in found.rows[i].tolist() if row >= 0]
        scores = everything.scores[i]
        if released:
            scores = scores / temperature
        score = dict(zip(everything.rows[i].tolist(), scores.tolist(), strict=True))
        assert len(set(rows)) == len(rows) == min(beams, trie.num_rows - len(exclude[i]))
        assert not set(rows) & set(exclude[i].tolist())
        scores = found.scores[i].tolist()
        assert scores[: len(rows)] == pytest.approx([score[row] for row in rows], abs=1e-9)
        assert scores == sorted(scores, reverse=True)
        assert torch.equal(found.tokens[i], torch.from_numpy(trie.rows)[found.rows[i]].long()) or (
            len(rows) < beams
        )
        assert 1 <= found.stats[i].target_passes <= levels
        assert 0 <= found.stats[i].accepted_levels <= levels - 1
        if released:  # each round settles one level more than it accepts
            assert found.stats[i].accepted_levels <= levels - found.stats[i].target_passes
        options |= {"seeds": seeds[i : i + 1], "exclude": exclude[i : i + 1]}
        alone = relaxed(DRAFTS[draft], [prompt], trie, beams, **options)
        assert torch.equal(alone.rows[0], found.rows[i])
        assert alone.stats[0].accepted_levels == found.stats[i].accepted_levels
    assert found.certificates == ["approximate"] * batch


@pytest.fixture
def wide():
    """A four-level catalog: bushy at the top, thin below."""
    rng = np.random.default_rng(1)
    return ItemTrie.build(np.stack([rng.integers(1, n, 600) for n in (20, 20, 40, 40)], axis=1))


def test_a_draft_by_the_target_is_accepted_in_one_pass(wide):
    prompts = random_prompts(np.random.default_rng(0), 4, 12)
    found = relaxed(ModelDrafter(TARGET), prompts, wide, 10, seeds=range(4))
    assert [s.target_passes for s in found.stats] == [1] * 4
    assert [s.accepted_levels for s in found.stats] == [3] * 4
    assert [s.draft_passes for s in found.stats] == [3] * 4
    assert [s.drafted_nodes for s in found.stats] == [30] * 4


@pytest.mark.parametrize(
    ("draft", "options", "message"),
    [
        (TARGET, {}, "give it seeds"),
        (None, {"seeds": [0]}, "needs a draft model that knows q, got NoneType"),
        (TARGET, {"seeds": [0], "draft_beams": 2}, r"at least num_beams \(3\), got 2"),
        (TARGET, {"seeds": [0], "traced": True}, "only strict verification can be traced"),
    ],
)
def test_errors_name_what_is_missing(wide, draft, options, message):
    with pytest.raises(ValueError, match=message):
        relaxed(draft, [PROMPT], wide, 3, **options)


def test_strict_verification_has_no_released_form(wide):
    with pytest.raises(ValueError, match="only relaxed verification has a released form"):
        speculative_beam_search(TARGET, TARGET, [PROMPT], wide, 3, released=True)
