"""Text constraints: what compiling, masks and steps cost, and what forced tokens save.

    python benchmarks/text_constraints.py

Cases of Koo et al. (Automata-based constraints for language model decoding, table 2), shorthands,
and catalogues of titles, ours against the same titles as a choice of llguidance. The tokenizer is a
byte-level BPE trained on the titles and texts found under RECSYS_DATASETS. A step is a mask and an
advance on random walks; medians. Forced tokens: texts of a random model, with and without. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from environment import environment
from rich.console import Console
from rich.table import Table

from recsys.constraint.grammar import (
    GrammarCompiler,
    choice,
    delimited_subsequence,
    json_schema,
    regex,
    substring_of,
)
from recsys.constraint.titles import TitleTrie
from recsys.constraint.token_trie import TextTokenizer
from recsys.decoding.constrained_text import sample_text
from recsys.decoding.titles import generate_titles
from recsys.testing import byte_level_tokenizer, random_prompts, tiny_model

if TYPE_CHECKING:
    from recsys.constraint.grammar import Grammar
    from recsys.constraint.protocol import Constraint

DATASETS = Path(os.environ.get("RECSYS_DATASETS", "../shared/datasets"))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "class": {"type": "string", "enum": ["Warrior", "Rogue", "Sorcerer"]},
        "life": {"type": "integer", "minimum": 0, "maximum": 999},
        "mana": {"type": "integer", "minimum": 0, "maximum": 999},
        "equipment": {
            "type": "array",
            "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 40},
                    "durability": {"type": "integer", "minimum": 0, "maximum": 999},
                    "quality": {"type": "string", "enum": ["Normal", "Magic", "Unique"]},
                },
                "required": ["name", "durability", "quality"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "class", "life", "mana", "equipment"],
    "additionalProperties": False,
}
CASES = {
    "multiple choice": regex("Red|Orange|Yellow|Green|Blue|Indigo|Violet"),
    "ISO date-time": regex(r"\d{4}-[01]\d-[0-3]\dT[0-2]\d:[0-5]\d:[0-5]\d([+-][0-2]\d:[0-5]\d|Z)"),
    "IP address": regex(r"((25[0-5]|2[0-4]\d|[01]?\d\d?)\.){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)"),
    "quoted text": regex(r'" *(?:[^\s"\\]|\\["n\\])(?: |[^\s"\\]|\\["n\\]){0,60}"'),
    "JSON object": json_schema(SCHEMA),
}


def main() -> None:
    """Run all and print tables, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    titles, texts = read_texts()
    start = time.perf_counter()
    tokenizer = TextTokenizer(byte_level_tokenizer([*titles, *texts], args.vocabulary))
    print(f"trained {tokenizer.vocabulary_size} tokens in {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    nodes = tokenizer.tokens.trie.num_nodes
    print(f"read their bytes ({nodes} nodes) in {time.perf_counter() - start:.2f} s")
    rng = np.random.default_rng(0)
    cases = CASES | {
        "substring of 2,000 characters": substring_of(" ".join(titles)[:2000]),
        "slate of 10 from 50 titles": delimited_subsequence(titles[:50], "; ", most=10),
    }
    result = {
        "vocabulary": tokenizer.vocabulary_size,
        "grammars": [
            {"case": name, **grammar_case(grammar, tokenizer, args.repeats, rng)}
            for name, grammar in cases.items()
        ],
        "titles": [
            title_case(titles[:count], tokenizer, rng) for count in (1000, 10_000, len(titles))
        ],
        "forced": forced(cases, tokenizer),
        "search": search(titles, tokenizer),
        **environment(),
    }
    for name in ("grammars", "titles", "forced", "search"):
        show(name, result[name])
    print(json.dumps(result))


def read_texts() -> tuple[list[str], list[str]]:
    """Distinct titles, and other texts to train on."""
    if not DATASETS.is_dir():
        sys.exit(f"no {DATASETS}; set RECSYS_DATASETS")
    with (DATASETS / "movielens-latest-small-2016" / "movies.csv").open(
        encoding="utf-8", newline=""
    ) as file:
        titles = [row["title"] for row in csv.DictReader(file)]
    places = json.loads((DATASETS / "letter-yelp" / "Yelp.item.json").read_text(encoding="utf-8"))
    titles += [place["title"] for place in places.values()]
    return list(dict.fromkeys(titles)), [place["description"] for place in places.values()]


def walk(constraint: Constraint, rng: np.random.Generator, steps: int) -> list[float]:
    """Seconds of single steps, a mask and an advance each, on random walks."""
    times, state = [], constraint.initial()
    for _ in range(steps):
        start = time.perf_counter()
        mask = constraint.allowed([state])[0]
        spent = time.perf_counter() - start
        options = np.flatnonzero(mask)
        if not len(options):
            state = constraint.initial()
            continue
        token = rng.choice(options)
        start = time.perf_counter()
        state = int(constraint.advance([state], [token])[0])
        times.append(spent + time.perf_counter() - start)
    return times


def grammar_case(
    grammar: Grammar, tokenizer: TextTokenizer, repeats: int, rng: np.random.Generator
) -> dict[str, float]:
    """Compile, again from the cache, and step."""
    GrammarCompiler(tokenizer).constraint(grammar)
    first, again, steps = [], [], []
    for _ in range(repeats):
        compiler = GrammarCompiler(tokenizer)
        start = time.perf_counter()
        compiler.constraint(grammar)
        first.append(time.perf_counter() - start)
        start = time.perf_counter()
        constraint = compiler.constraint(grammar)
        again.append(time.perf_counter() - start)
        steps += walk(constraint, rng, 60)
    return {
        "compile_ms": round(1e3 * float(np.median(first)), 3),
        "from_cache_ms": round(1e3 * float(np.median(again)), 3),
        "step_us": round(1e6 * float(np.median(steps)), 1),
        "step_us_p99": round(1e6 * float(np.percentile(steps, 99)), 1),
    }


def title_case(
    titles: list[str], tokenizer: TextTokenizer, rng: np.random.Generator
) -> dict[str, float]:
    """Our trie and llguidance's choice of the same titles."""
    start = time.perf_counter()
    trie = TitleTrie.build(titles, tokenizer.tokens)
    built = time.perf_counter() - start
    start = time.perf_counter()
    trie.allowed([trie.initial()])
    root = time.perf_counter() - start
    fresh = walk(trie, rng, 500)
    start = time.perf_counter()
    nodes = np.arange(trie.trie.num_nodes)
    for first in range(0, len(nodes), 256):
        trie.allowed(nodes[first : first + 256])
    everything = time.perf_counter() - start
    kept = walk(trie, rng, 500)
    other: dict[str, float] = {}
    start = time.perf_counter()
    try:
        constraint = GrammarCompiler(tokenizer).constraint(choice(titles))
    except ValueError:  # its limits; they can be raised
        pass
    else:
        other["choice_s"] = round(time.perf_counter() - start, 3)
        other["choice_step_us"] = round(1e6 * float(np.median(walk(constraint, rng, 500))), 1)
    return {
        "titles": len(titles),
        "states": trie.trie.num_nodes,
        "build_s": round(built, 3),
        "first_mask_ms": round(1e3 * root, 2),
        "new_step_us": round(1e6 * float(np.median(fresh)), 1),
        "kept_step_us": round(1e6 * float(np.median(kept)), 1),
        "all_masks_s": round(everything, 2),
        **other,
    }


def forced(cases: dict[str, Grammar], tokenizer: TextTokenizer) -> list[dict[str, Any]]:
    """Forwards of a random model with and without forced tokens."""
    model = tiny_model("llama-gqa", tokenizer.vocabulary_size)
    compiler = GrammarCompiler(tokenizer)
    rows = []
    for name, grammar in cases.items():
        row: dict[str, Any] = {"case": name}
        for skip in (False, True):
            prompts = random_prompts(np.random.default_rng(0), 16, 20, tokenizer.vocabulary_size)
            constraints = [compiler.constraint(grammar) for _ in prompts]
            found = sample_text(model, prompts, constraints, 600, skip_forced=skip)
            assert all(text.finished for text in found)
            tokens = sum(len(text.tokens) for text in found)
            passes = sum(text.stats.target_passes for text in found)
            key = "with_forced" if skip else "drawn"
            row |= {f"{key}_tokens": tokens, f"{key}_forwards": passes}
        row["saved"] = round(1 - row["with_forced_forwards"] / row["with_forced_tokens"], 3)
        rows.append(row)
    return rows


def search(titles: list[str], tokenizer: TextTokenizer) -> list[dict[str, Any]]:
    """Beam search over all titles with a random LLaMA: every answer must be a title, once."""
    model = tiny_model("llama-gqa", tokenizer.vocabulary_size, initializer_range=0.05)
    trie = TitleTrie.build(titles, tokenizer.tokens)
    rows = []
    for beams in (5, 10, 20):
        prompts = [np.asarray(tokenizer.encode("; ".join(titles[i : i + 5]))) for i in range(16)]
        start = time.perf_counter()
        found = generate_titles(model, prompts, trie, beams)
        seconds = time.perf_counter() - start
        texts = found.texts
        written = [
            tokenizer.decode(tokens[:length])
            for row, lengths in zip(texts.tokens.tolist(), texts.lengths.tolist(), strict=True)
            for tokens, length in zip(row, lengths, strict=True)
            if length
        ]
        assert set(written) <= set(titles)
        rows.append(
            {
                "beams": beams,
                "requests": len(prompts),
                "titles_written": len(written),
                "titles_asked": beams * len(prompts),
                "seconds": round(seconds, 2),
            }
        )
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """One table."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*[str(row.get(column, "–")) for column in columns])
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
