"""Text constraints in counts: valid texts, faulty constraints, tokenisations, passes, the cache.

    OMP_NUM_THREADS=1 python benchmarks/text_counts.py

The models are LLaMAs of random weights, which wander where trained ones do not, and the tokenizer
is a byte-level BPE. Nothing is timed, so the figures hardly depend on the machine.

- Known names of grammars and `text_until`: of the texts that were complete within 200 tokens, how
  many a regular expression of Python, or a count of tokens, finds valid; and whether the constraint
  passes `check_constraint`.
- Constraints with one fault each: how many `check_constraint` finds.
- Titles: how many of those in the lists of beam search are written as the tokenizer itself would
  write them, if every tokenisation is allowed, and if only the tokenizer's own is.
- Drafted text: passes of the model, tokens and forced tokens of a text, without a draft, with a
  smaller model, and with the model itself as the draft, at temperature 0. The texts are compared.
- Explanations: grammars that were compiled and that were in the cache, for customers who ask for
  reasons of the same items once and again.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table

from recsys.benchmark.environment import environment
from recsys.constraint import ItemTrie
from recsys.decoding import beam_search
from recsys.testing import byte_level_tokenizer, random_prompts, tiny_model
from recsys.text import (
    Explainer,
    GrammarCompiler,
    TextDraft,
    TextTokenizer,
    TitleTrie,
    check_constraint,
    generate_titles,
    lark,
    sample_text,
    structured,
    text_until,
)
from recsys.text.constraint import DEAD
from recsys.text.grammar_constraint import Parser

Row = dict[str, Any]

WORDS = ("silver", "garden", "night", "of", "the", "river", "blue", "kit", "mystery", "house")
TITLES = sorted({f"{a} {b} {n}" for a in WORDS for b in WORDS for n in (1, 2)})
IMAGE = "<|image|>"
ROWS = 512  # of the models' heads
LIMIT = 200  # tokens of a text, at most


class Review(BaseModel):
    """A text of the schema."""

    model_config = ConfigDict(extra="forbid")
    title: Literal["silver garden 1", "blue river 2", "night kit 1"]
    mood: Literal["calm", "cosy", "thrilling"]
    words: str = Field(max_length=40)
    stars: int = Field(ge=1, le=5)


class Automaton:
    """A constraint as a user may write it: states and tokens -> next state; token 0 ends."""

    vocabulary_size, end_tokens = 4, (0,)

    def __init__(self, **changes: Any) -> None:
        self.arcs = {(1, 2): 1, (1, 3): 2, (2, 0): 3, **changes.pop("arcs", {})}
        self.changes, self.begun = changes, 0

    def initial(self) -> int:
        """The first state; another one later if it is to be forgetful."""
        self.begun += 1
        return 2 if self.changes.get("forgetful") and self.begun > 2 else 1

    def after(self, state: int, token: int) -> int:
        """The state after one token."""
        return self.arcs.get((int(state), int(token)), DEAD)

    def advance(self, states: ArrayLike, tokens: ArrayLike) -> NDArray[np.int64]:
        """The states after tokens."""
        pairs = zip(np.asarray(states), np.asarray(tokens), strict=True)
        return np.asarray([self.after(s, t) for s, t in pairs], np.int64)

    def allowed(self, states: ArrayLike) -> NDArray[np.bool_]:
        """The tokens that may follow."""
        states = np.asarray(states)
        mask = np.asarray([[self.after(s, t) != DEAD for t in range(4)] for s in states])
        return mask | (np.arange(4) == self.changes.get("wide", -1))

    def forced(self, states: ArrayLike) -> list[list[int]]:
        """Forced tokens."""
        return [list(self.changes.get("forces", ())) for _ in np.asarray(states)]

    def merge_keys(self, states: ArrayLike) -> NDArray[np.int64]:
        """The states themselves."""
        return np.asarray(states, np.int64)


FAULTS = {
    "a dead end": Automaton(arcs={(2, 1): 5}),
    "a token after the end": Automaton(arcs={(3, 2): 2}),
    "a token after a refused one": Automaton(arcs={(DEAD, 1): 1}),
    "a mask that is too wide": Automaton(wide=1),
    "a forced token that is not allowed": Automaton(forces=[1]),
    "not deterministic": Automaton(forgetful=True),
}


def count_valid(tokenizer: TextTokenizer, image: int, texts: int) -> list[Row]:
    """A row for each name."""
    model, compiler = tiny_model("llama", ROWS), GrammarCompiler(tokenizer)
    spelling = tokenizer.tokens.spelling

    def matches(pattern: str) -> Callable[[list[int], str], bool]:
        return lambda _, text: re.fullmatch(pattern, text, re.DOTALL) is not None

    quoted = r"""("([^"\\\r\n]|\\[^\r\n])*"|'([^'\\\r\n]|\\[^\r\n])*')"""
    cases: dict[str, tuple[Any, Callable[[list[int], str], bool]]] = {
        "QUOTED_TEXT": (lark('start: "a: " QUOTED_TEXT "\\n"'), matches(f"a: {quoted}\n")),
        "UNQUOTED_TEXT": (lark('start: "a: " UNQUOTED_TEXT "\\n"'), matches("a: [^\"'\r\n]+\n")),
        "text_token": (
            lark("start: text_token{1,9}"),
            lambda tokens, _: 1 <= len(tokens) - 1 <= 9 and all(spelling[t] for t in tokens[:-1]),
        ),
        "paragraph_token": (
            lark('start: paragraph_token{1,9} "\\n"'),
            lambda tokens, text: 1 <= len(tokens) - 2 <= 9 and text.index("\n") == len(text) - 1,
        ),
        "text_until": (text_until("."), lambda _, text: text.find(".") == len(text) - 1),
        IMAGE: (
            lark(f'start: "see " image{{1,3}} "."\nimage: {IMAGE}'),
            lambda tokens, _: 1 <= tokens.count(image) <= 3,
        ),
    }  # fmt: skip
    rows = []
    rng = np.random.default_rng(0)
    for name, (grammar, judge) in cases.items():
        prompts = random_prompts(rng, texts, 9, ROWS)
        constraints = [compiler.constraint(grammar) for _ in prompts]
        found = sample_text(model, prompts, constraints, LIMIT, temperature=3.0)
        whole = [text.tokens for text in found if text.finished]
        valid = sum(judge(tokens, tokenizer.decode(tokens)) for tokens in whole)
        check_constraint(compiler.constraint(grammar), walks=10, longest=30)
        rows.append({"name": name, "complete": len(whole), "valid": valid})
    return rows


def find_faults() -> Row:
    """Faulty constraints that the check finds, after it has passed one without a fault."""
    check_constraint(Automaton())
    found = []
    for name, constraint in FAULTS.items():
        try:
            check_constraint(constraint)
        except ValueError:
            found.append(name)
    return {"faulty": len(FAULTS), "found": len(found)}


def count_tokenisations(tokenizer: TextTokenizer, requests: int) -> list[Row]:
    """Titles of beam search in every tokenisation, and in the tokenizer's own."""
    model = tiny_model("llama", ROWS)
    prompts = random_prompts(np.random.default_rng(1), requests, 9, ROWS)
    own = {title: tokenizer.encode(title) for title in TITLES}
    every = generate_titles(model, prompts, TitleTrie.build(TITLES, tokenizer.tokens), num_beams=10)
    texts, lengths = every.texts.tokens.tolist(), every.texts.lengths.tolist()
    written = [
        tokens[:length]
        for request in zip(texts, lengths, strict=True)
        for tokens, length in zip(*request, strict=True)
        if length
    ]
    rows = [_of("every tokenisation", written, own, tokenizer)]
    trie = ItemTrie.build(list(own.values()), end=tokenizer.end_tokens[0])
    found = beam_search(model, prompts, trie, 10).rows.tolist()
    written = [trie.rows[row].tolist() for line in found for row in line if row >= 0]
    rows.append(_of("the tokenizer's own", written, own, tokenizer))
    return rows


def _of(
    allowed: str, written: list[list[int]], own: dict[str, list[int]], tokenizer: TextTokenizer
) -> Row:
    """How many titles were written, and how many of them in the tokenizer's own way."""
    plain = [[t for t in tokens if t not in tokenizer.end_tokens] for tokens in written]
    same = sum(tokens == own[tokenizer.decode(tokens)] for tokens in plain)
    return {"allowed": allowed, "titles": len(written), "own": same}


def count_passes(tokenizer: TextTokenizer, texts: int) -> list[Row]:
    """Passes of a text for each draft."""
    model, small = (
        tiny_model("llama", ROWS, seed=seed, layers=layers, dtype=torch.float64)
        for seed, layers in ((0, 2), (1, 1))
    )
    prompts = random_prompts(np.random.default_rng(2), texts, 9, ROWS)
    compiler, plain, rows = GrammarCompiler(tokenizer), None, []
    for name, draft in (("none", None), ("another model", small), ("the model", model)):
        found = sample_text(
            model,
            prompts,
            [compiler.constraint(structured(Review)) for _ in prompts],
            LIMIT,
            temperature=0,
            draft=None if draft is None else TextDraft(draft, 4),
        )
        tokens = [text.tokens for text in found]
        plain = plain or tokens
        rows.append(
            {
                "draft": name,
                "tokens": float(np.mean([len(own) for own in tokens])),
                "forced": float(np.mean([text.forced for text in found])),
                "passes": float(np.mean([text.stats.target_passes for text in found])),
                "drafted": float(np.mean([text.stats.drafted_nodes for text in found])),
                "differing": sum(a != b for a, b in zip(tokens, plain, strict=True)),
            }
        )
    return rows


def count_compiled(fast: Any, customers: int) -> list[Row]:
    """Grammars that are compiled for the reasons of three items for each customer, and again."""
    explainer = Explainer(tiny_model("llama", ROWS), fast, longest_reason=5)
    compiled: list[object] = []
    compile_ = Parser.compile
    rng = np.random.default_rng(3)
    asked = [
        ([TITLES[i] for i in chosen[:5]], [TITLES[i] for i in chosen[5:]])
        for chosen in (rng.choice(len(TITLES), 8, replace=False) for _ in range(customers))
    ]
    rows = []
    Parser.compile = lambda *words: compiled.append(words) or compile_(*words)  # type: ignore
    try:
        for when in ("first", "again"):
            before = len(compiled)
            for history, items in asked:
                explainer.explain(history, items)
            made = len(compiled) - before
            rows.append({"request": when, "reasons": 3 * customers, "compiled": made})
    finally:
        Parser.compile = compile_  # type: ignore[method-assign]
    return rows


def main() -> int:
    """Count, print tables and one line of JSON; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=50, help="texts, requests and customers")
    texts = parser.parse_args().texts
    torch.set_num_threads(1)
    fast = byte_level_tokenizer([*TITLES, "I liked it; it is calm, and cosy. " * 5], ROWS - 1)
    fast.add_special_tokens({"additional_special_tokens": [IMAGE]})
    tokenizer = TextTokenizer(fast, ROWS)
    parts: dict[str, list[Row]] = {
        "Names of grammars": count_valid(tokenizer, fast.convert_tokens_to_ids(IMAGE), texts),
        "Constraints with a fault": [find_faults()],
        "Titles": count_tokenisations(tokenizer, texts),
        "Drafted text": count_passes(tokenizer, texts),
        "Explanations": count_compiled(fast, texts),
    }
    for title, rows in parts.items():
        table = Table(*rows[0], title=title, title_justify="left")
        for row in rows:
            table.add_row(*(f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()))
        Console(width=100).print(table)
    print(json.dumps({"benchmark": "text_counts", **parts, "environment": environment()}))
    wrong = [row["complete"] - row["valid"] for row in parts["Names of grammars"]]
    wrong += [row["faulty"] - row["found"] for row in parts["Constraints with a fault"]]
    wrong += [row["differing"] for row in parts["Drafted text"]]
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())
