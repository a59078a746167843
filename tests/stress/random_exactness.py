"""Random searches against plain enumeration: no excluded row, no missing row, no false certificate.

    python tests/stress/random_exactness.py --cases 20000 --seed 0

A case is a random catalog (3 to 6 levels, shared leaves), a batch of prompts, and for each request
a mask, exclusions of 0 to 100 %, boosts, and a beam width from 1 to twice the catalog. All searches
of `recsys.decoding` run on it. Their answers are compared with the oracle below, which is plain
Python over lists and dictionaries and imports nothing of the project.

The model is scripted. A token's logit is an integer that depends on all tokens before it and their
positions; one token outside the catalog has logit 0 and all others are at most -40, so that the
sum of exponentials rounds to 1 and a log-probability is exactly the logit. Scores are sums of
integers, equal scores are common, and the oracle needs no tolerance.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transformers

from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.mask import RowMask
from recsys.decoding import (
    Engine,
    ModelDrafter,
    SearchRequest,
    beam_search,
    speculative_beam_search,
)
from recsys.decoding.planner import Plan
from recsys.models.cache import CachePool
from recsys.models.tree_forward import TreeModel
from recsys.modes import Mode

WORD = (1 << 64) - 1
Row = tuple[int, ...]


# The script: logits as a function of the tokens before them.


def mix(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


@dataclass(frozen=True)
class Script:
    """Logits of a scripted model.

    Attributes:
        salt: distinguishes scripts.
        vocabulary: V; token V - 1 has logit 0 and is in no catalog.
        spread: number of values that a logit takes; few values make ties.
        noise: share of the logits, in 256ths, that depend on `other_salt` instead.
        other_salt: salt of those.
    """

    salt: int
    vocabulary: int
    spread: int
    noise: int = 0
    other_salt: int = 0

    def logit(self, path: tuple[int, ...], token: int) -> int:
        """The logit of `token` behind the tokens of `path`."""
        if token == self.vocabulary - 1:
            return 0
        seen = sum(mix(t * 65536 + place) for place, t in enumerate(path)) & WORD
        bits = mix(mix(seen ^ self.salt) + token)
        if (bits >> 56) < self.noise:
            bits = mix(mix(seen ^ self.other_salt) + token)
        return -40 - (bits & 0xFFFFFF) % self.spread


def mix_all(x: np.ndarray) -> np.ndarray:
    """`mix` of an array of uint64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class ScriptedModel(TreeModel):
    """A `TreeModel` that follows a script.

    The cache holds each token and its position instead of keys. The path of a token is read from
    the slots that the mask shows, so a wrong slot, position or mask changes the logits.
    """

    def __init__(self, script: Script) -> None:
        self.script, self.vocabulary_size = script, script.vocabulary
        self.config = transformers.LlamaConfig(
            hidden_size=2, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
        )
        self.window, self.prefixes, self.version, self.max_positions = None, None, "", None
        self._layer_kinds: set[str] = set()
        self.pool = CachePool(self.config, torch.float64, torch.device("cpu"))

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the cache; 64 bits hold tokens and positions exactly."""
        return torch.float64

    @property
    def score_dtype(self) -> torch.dtype:
        """The dtype of scores in a service."""
        return torch.float32

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: Any,
        cache: Any,
        *,
        write: torch.Tensor,
        view: int,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of the wanted tokens, as in `TreeModel.forward`."""
        cache.select(write, view)
        keys = torch.stack([tokens, positions], dim=-1).double()[:, None]
        kept, _ = cache.update(keys, keys, 0)
        seen = (mask(None) == 0).expand(len(tokens), 1, tokens.shape[1], view)[:, 0].numpy()
        table = kept[:, 0].numpy().astype(np.uint64)
        marks = mix_all(table[..., 0] * np.uint64(65536) + table[..., 1])
        paths = (seen * marks[:, None, :]).sum(-1, dtype=np.uint64)
        if rows is not None:
            paths = np.take_along_axis(paths, rows.numpy(), axis=1)
        script, token = self.script, np.arange(self.vocabulary_size, dtype=np.uint64)
        bits = mix_all(mix_all(paths ^ np.uint64(script.salt))[..., None] + token)
        if script.noise:
            other = mix_all(mix_all(paths ^ np.uint64(script.other_salt))[..., None] + token)
            bits = np.where((bits >> np.uint64(56)) < script.noise, other, bits)
        logits = -40.0 - ((bits & np.uint64(0xFFFFFF)) % np.uint64(script.spread)).astype(float)
        logits[..., -1] = 0.0
        return torch.from_numpy(logits).float()


# Cases.


@dataclass(frozen=True)
class Request:
    """One request, in terms of sequences and items.

    Attributes:
        prompt: its tokens.
        excluded: sequences that must not be in its answer.
        allowed: items that may be in its answer; None for all.
        boost: added to the score of each item; None adds nothing.
    """

    prompt: tuple[int, ...]
    excluded: frozenset[Row]
    allowed: frozenset[int] | None
    boost: tuple[int, ...] | None


@dataclass(frozen=True)
class Case:
    """A catalog, a batch and a beam width.

    Attributes:
        items: token sequence of each item; some items share one.
        requests: the batch.
        num_beams: K.
        script: of the target.
        draft: of the draft.
        seed: of everything random in the searches.
    """

    items: tuple[Row, ...]
    requests: tuple[Request, ...]
    num_beams: int
    script: Script
    draft: Script
    seed: int

    @classmethod
    def draw(cls, seed: int) -> Case:
        """The case of a seed."""
        rng = np.random.default_rng(seed)
        levels = int(rng.integers(3, 7))
        codes = [int(rng.choice([2, 3, 4, 9, 40, 400])) for _ in range(levels)]
        apart = bool(rng.integers(2))  # whether each level has tokens of its own
        count = int(rng.choice([1, 3, 4, 5, 6, 8, 12, 20, 40]))
        firsts = np.cumsum([0, *codes]) if apart else np.zeros(levels + 1, int)
        rows = np.stack([rng.integers(0, c, count) for c in codes], axis=1) + firsts[:-1]
        # a few prefixes, with many or with few sequences below them
        few = -(-count // int(rng.integers(1, 6)))
        owner = rng.integers(0, few, count)
        shared = np.where(rng.random(count) < 0.5, levels - 1, rng.integers(0, levels, count))
        depth = np.arange(levels) < shared[owner][:, None]
        rows = np.where(depth, rows[owner], rows)
        items = [tuple(map(int, row)) for row in rows]
        vocabulary = int(firsts[-1] + max(codes)) + 1
        spread = int(rng.choice([1, 2, 4, 20]))
        script = Script(int(rng.integers(1 << 62)), vocabulary, spread)
        draft = replace(script, noise=int(rng.choice([0, 30, 256])), other_salt=script.salt + 1)
        sequences = sorted(set(items))
        requests, boosted = [], rng.integers(3) == 0
        for _ in range(int(rng.integers(1, 4))):
            share = float(rng.choice([0, 0.3, 0.6, 0.8, 0.95, 1]))
            kept = float(rng.choice([0.05, 0.5, 0.9]))
            requests.append(
                Request(
                    tuple(map(int, rng.integers(0, vocabulary, rng.integers(1, 6)))),
                    cls.some(sequences, share, rng),
                    None
                    if rng.integers(2)
                    else frozenset(np.flatnonzero(rng.random(count) < kept).tolist()),
                    tuple(map(int, rng.integers(-8, 9, count))) if boosted else None,
                )
            )
        size = len(sequences)
        num_beams = int(
            rng.integers(1, size + 1) if rng.integers(2) else size + rng.integers(size + 1)
        )
        return cls(tuple(items), tuple(requests), num_beams, script, draft, seed)

    @staticmethod
    def some(rows: list[Row], share: float, rng: np.random.Generator) -> frozenset[Row]:
        """About this share of the rows, chosen one by one or by prefixes of one length."""
        depth = int(rng.integers(1, len(rows[0]) + 1)) if rng.integers(2) else len(rows[0])
        chosen = {prefix: rng.random() < share for prefix in sorted({r[:depth] for r in rows})}
        return frozenset(row for row in rows if chosen[row[:depth]])

    @property
    def levels(self) -> int:
        """L."""
        return len(self.items[0])


# The oracle: enumeration in plain Python.


class Oracle:
    """The right answers of a case, found by enumerating all sequences."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.holders: dict[Row, list[int]] = {}
        for item, row in enumerate(case.items):
            self.holders.setdefault(row, []).append(item)
        self.rows = sorted(self.holders)
        # The noise of a sample is keyed by the number of a prefix: depth by depth, in order.
        prefixes = [sorted({row[:depth] for row in self.rows}) for depth in range(case.levels + 1)]
        self.number = {p: n for n, p in enumerate(p for level in prefixes for p in level)}

    def allowed(self, request: Request) -> list[Row]:
        """Sequences that may be in the answer."""
        return [
            row
            for row in self.rows
            if row not in request.excluded
            and (request.allowed is None or any(i in request.allowed for i in self.holders[row]))
        ]

    def steps(self, request: Request, row: Row) -> list[int]:
        """Log-probability of each token of a sequence."""
        return [
            self.case.script.logit(request.prompt + row[:place], token)
            for place, token in enumerate(row)
        ]

    def gain(self, request: Request, prefix: Row) -> int:
        """The largest boost of an item below a prefix."""
        if request.boost is None:
            return 0
        below = (
            i for row, held in self.holders.items() if row[: len(prefix)] == prefix for i in held
        )
        return max(request.boost[i] for i in below)

    def score(self, request: Request, row: Row) -> int:
        """Log-probability of a sequence plus its boost."""
        return sum(self.steps(request, row)) + self.gain(request, row)

    def beams(self, request: Request, num_beams: int) -> list[Row]:
        """Beam search: the best prefixes of every level, equal ones in row order."""
        rows, kept = self.allowed(request), [()]
        for depth in range(1, self.case.levels + 1):
            found = sorted({row[:depth] for row in rows if row[: depth - 1] in set(kept)})
            found.sort(key=lambda prefix: -self.score(request, prefix))
            kept = found[:num_beams]
        return kept

    def best(self, request: Request, num_beams: int) -> list[Row]:
        """The best sequences of all."""
        rows = self.allowed(request)
        return sorted(rows, key=lambda row: -self.score(request, row))[:num_beams]

    def sample(self, request: Request, num_beams: int, seed: int, temperature: float) -> list[Row]:
        """The sample of a seed: beam search over perturbed log-probabilities."""
        rows = self.allowed(request)
        kept: list[tuple[Row, float, float]] = [((), 0.0, 0.0)]
        for depth in range(1, self.case.levels + 1):
            found = []
            for prefix, log_prob, perturbed in kept:
                children = sorted({row[:depth] for row in rows if row[: depth - 1] == prefix})
                if not children:
                    continue
                path = request.prompt + prefix
                logits = [self.case.script.logit(path, c[-1]) / temperature for c in children]
                most = max(logits)
                total = most + math.log(sum(math.exp(x - most) for x in logits))
                logs = [log_prob + x - total for x in logits]
                noisy = [
                    x + gumbel(seed, self.number[c]) for x, c in zip(logs, children, strict=True)
                ]
                top = max(noisy)
                for child, x, g in zip(children, logs, noisy, strict=True):
                    gap = perturbed - g + (math.log1p(-math.exp(g - top)) if g < top else -math.inf)
                    value = perturbed - max(gap, 0.0) - math.log1p(math.exp(-abs(gap)))
                    found.append((child, x, value))
            found.sort(key=lambda one: -one[2])
            kept = found[:num_beams]
        return [row for row, _, _ in kept]


def gumbel(seed: int, number: int) -> float:
    """Noise of one prefix for one seed."""
    bits = mix((mix(seed) + number) & WORD) >> 12
    return -math.log(-math.log((bits + 0.5) * 2.0**-52))


# Comparison.


class Checker:
    """Runs all searches on a case and compares their answers with the oracle's."""

    def __init__(self, case: Case) -> None:
        self.case, self.oracle = case, Oracle(case)
        self.trie = ItemTrie.build(case.items)
        self.row_number = {row: n for n, row in enumerate(self.oracle.rows)}
        self.target, self.draft = ScriptedModel(case.script), ScriptedModel(case.draft)
        self.prompts = [list(r.prompt) for r in case.requests]
        self.exclude = [
            np.array(sorted(self.row_number[row] for row in r.excluded), np.int64)
            for r in case.requests
        ]
        self.masks = [self._mask(r) for r in case.requests]
        self.boosts = [self._boost(r) for r in case.requests]
        self.rng = np.random.default_rng(case.seed)
        self.faults: list[str] = []
        self.ways: Counter[str] = Counter()

    def _by_place(self, values: np.ndarray) -> np.ndarray:
        """Values by item in the order of the trie: by row, and by item within a row."""
        places = [i for row in self.oracle.rows for i in self.oracle.holders[row]]
        return values[places]

    def _mask(self, request: Request) -> RowMask | None:
        if request.allowed is None:
            return None
        allowed = np.isin(np.arange(len(self.case.items)), sorted(request.allowed))
        return RowMask.of(self.trie, self._by_place(allowed))

    def _boost(self, request: Request) -> Boost | None:
        if request.boost is None:
            return None
        return Boost.of(self.trie, self._by_place(np.array(request.boost, np.float32)))

    @property
    def limits(self) -> dict[str, Any]:
        """Arguments of every search."""
        return {"exclude": self.exclude, "masks": self.masks, "boosts": self.boosts}

    def run(self) -> list[str]:
        """Run all searches; returns the faults."""
        case, K = self.case, self.case.num_beams
        request = SearchRequest(self.prompts, **self.limits)
        ask = (request, self.trie, K)
        self.check("beam", beam_search(self.target, *ask))
        strict = speculative_beam_search
        self.check("strict", strict(self.target, None, *ask))
        nodes = int(self.rng.integers(1, 40))
        drafter = ModelDrafter(self.draft, nodes)
        patch = int(self.rng.integers(1, 20))
        found = strict(self.target, drafter, *ask, patch_nodes=patch)
        self.check("strict, drafted", found)
        count = len(self.oracle.rows)
        rows = [self.rng.integers(0, count, self.rng.integers(0, 6)) for _ in case.requests]
        plain = {k: v for k, v in self.limits.items() if k != "boosts"}
        ask = (replace(request, candidates=rows), self.trie, K)
        for name, along in (
            ("beam, candidates", beam_search(self.target, *ask)),
            ("strict, candidates", strict(self.target, drafter, *ask)),
        ):
            self.check(name, along)
            self.check_candidates(name, along, rows)
        engine = Engine(self.target, self.trie, draft=self.draft)
        engine.planner = _AnyPlan(self.rng)  # type: ignore[assignment]
        self.check("planned", engine.decode(request, K, mode="planned").beams)
        whole = engine.decode(request, K, mode="beam", until_global=True).beams
        self.check("complete", whole, complete=True)
        self.samples(plain)
        return self.faults

    def samples(self, plain: dict[str, Any]) -> None:
        """Check samples by seed: plain and speculative ones are the oracle's."""
        case, K = self.case, self.case.num_beams
        seeds = [int(s) for s in self.rng.integers(0, 1 << 40, len(case.requests))]
        temperature = float(self.rng.choice([0.5, 1.0, 3.0]))
        request = SearchRequest(self.prompts, seeds=seeds, temperature=temperature, **plain)
        found = beam_search(self.target, request, self.trie, K)
        drafted = speculative_beam_search(
            self.target, ModelDrafter(self.draft, 20), request, self.trie, K
        )
        relaxed = speculative_beam_search(self.target, self.draft, request, self.trie, K, "relaxed")
        for i, request in enumerate(case.requests):
            want = self.oracle.sample(request, K, seeds[i], temperature)
            expected = [self.row_number[row] for row in want]
            for name, beams in (("sample", found), ("sample, drafted", drafted)):
                rows = [r for r in beams.rows[i].tolist() if r >= 0]
                self.ways[name] += 1
                if rows != expected:
                    self.faults.append(f"{name}: request {i} has rows {rows}, not {expected}")
            allowed = {self.row_number[row] for row in self.oracle.allowed(request)}
            rows = [r for r in relaxed.rows[i].tolist() if r >= 0]
            self.ways["relaxed"] += 1
            if len(set(rows)) < len(rows) or not set(rows) <= allowed:
                self.faults.append(f"relaxed: request {i} has rows {rows} of {sorted(allowed)}")
            if len(rows) != min(K, len(allowed)):
                self.faults.append(f"relaxed: request {i} has {len(rows)} of {len(allowed)} rows")

    def check(self, way: str, beams: Any, *, complete: bool = False) -> None:
        """Compare an answer with the oracle's."""
        case = self.case
        for i, request in enumerate(case.requests):
            self.ways[way] += 1
            want = self.oracle.beams(request, case.num_beams)
            best = self.oracle.best(request, case.num_beams)
            certificate = beams.certificates[i]
            if complete and certificate == "global-exact":
                want = best
            rows, scores = beams.rows[i].tolist(), beams.scores[i].tolist()
            order = sorted(want, key=lambda row: (-self.oracle.score(request, row), row))
            expected = [self.row_number[row] for row in order]
            missing = [-1] * (case.num_beams - len(expected))
            if rows != expected + missing:
                self.faults.append(f"{way}: request {i} has rows {rows}, not {expected}")
                continue
            log_probs = [float(sum(self.oracle.steps(request, row))) for row in order]
            if scores != log_probs + [-math.inf] * len(missing):
                self.faults.append(f"{way}: request {i} has scores {scores}, not {log_probs}")
            tokens = [tuple(t) for t in beams.tokens[i].tolist()]
            if tokens[: len(order)] != order:
                self.faults.append(f"{way}: request {i} has tokens {tokens}, not {order}")
            ranked = sorted(best, key=lambda row: (-self.oracle.score(request, row), row))
            if certificate == "global-exact" and order != ranked:
                self.faults.append(f"{way}: request {i} is certified {certificate}: {order}")
            if complete and len(order) < len(ranked):
                self.faults.append(f"{way}: request {i} lacks rows of {ranked}")

    def check_candidates(self, way: str, beams: Any, rows: list[np.ndarray]) -> None:
        """Compare the scores of candidates with the oracle's."""
        for i, request in enumerate(self.case.requests):
            said = beams.candidate_scores[i].tolist()
            steps = (self.oracle.steps(request, self.oracle.rows[r]) for r in rows[i].tolist())
            want = [float(sum(step)) for step in steps]
            if said != want + [-math.inf] * (len(said) - len(want)):
                self.faults.append(f"{way}: candidates of request {i} score {said}, not {want}")


class _AnyPlan:
    """A planner that takes any plan."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choose(self, _: Any) -> Plan:
        """A plan."""
        return [Plan(), Plan(Mode.EXHAUSTIVE), Plan(Mode.DRAFT, int(self._rng.integers(1, 60)))][
            int(self._rng.integers(3))
        ]

    def learn(self, *_: Any) -> None:
        """Learn nothing."""


def main() -> int:
    """Run, and print one line of JSON last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000, help="how many cases")
    parser.add_argument("--seed", type=int, default=0, help="the first case's seed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start, ways, wrong = time.perf_counter(), Counter[str](), 0
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        checker = Checker(Case.draw(seed))
        try:
            faults = checker.run()
        except Exception as error:
            faults = [f"{type(error).__name__}: {error}"]
        ways += checker.ways
        if faults:
            wrong += 1
            print(f"case {seed}: {faults[0]} ({len(faults)} in all)", flush=True)
    for way, answers in sorted(ways.items()):
        print(f"{answers:>9,} answers  {way}")
    line = {
        "cases": arguments.cases,
        "first_seed": arguments.seed,
        "wrong_cases": wrong,
        "answers": ways.total(),
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(line))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
