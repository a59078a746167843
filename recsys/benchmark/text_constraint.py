r"""Text constraints: what compiling, masks and steps cost on each library, and whether texts hold.

Cases are those of Koo et al. (Automata-based constraints for language model decoding, table 2,
appendix C.4), shorthands of this package, and catalogues of titles, as a trie and as a choice. A
step is a mask and an advance, on random walks. Texts are a random model's, each of them checked.

Titles are those of MovieLens and Yelp where they lie among the raw files, made-up ones elsewhere;
the tokenizer is a byte-level BPE trained on them.
"""

from __future__ import annotations

import csv
import json
import re
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from recsys.constraint.grammar import (
    GrammarCompiler,
    choice,
    delimited_subsequence,
    json_schema,
    lark,
    parse,
    regex,
    structured,
    substring_of,
)
from recsys.constraint.parser import installed_backends
from recsys.constraint.protocol import ROOT, tree_states
from recsys.constraint.titles import TitleTrie
from recsys.constraint.token_trie import TextTokenizer
from recsys.decoding.constrained_text import sample_text
from recsys.decoding.titles import generate_titles
from recsys.raw_files import find_raw
from recsys.testing import byte_level_tokenizer, random_prompts, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from recsys.constraint.grammar import Grammar
    from recsys.constraint.parser import BackendName
    from recsys.constraint.protocol import Constraint
    from recsys.decoding.constrained_text import SampledText

    Row = dict[str, Any]

STEPS = 60  # of one walk
REQUESTS = 16  # of a beam search
PARTS = 5
EQUIPMENT = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "durability": {"type": "integer"},
        "quality": {"type": "string", "enum": ["Normal", "Magic", "Unique"]},
    },
    "required": ["name", "durability", "quality"],
    "additionalProperties": False,
}
CHARACTER = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "class": {"type": "string", "enum": ["Warrior", "Rogue", "Sorcerer"]},
        "life": {"type": "integer"},
        "mana": {"type": "integer"},
        "equipment": {"type": "array", "items": EQUIPMENT},
    },
    "required": ["name", "class", "life", "mana", "equipment"],
    "additionalProperties": False,
}
TABLE_2 = {
    "multiple choice": regex("Red|Orange|Yellow|Green|Blue|Indigo|Violet"),
    "ISO date-time": regex(r"\d{4}-[01]\d-[0-3]\dT[0-2]\d:[0-5]\d:[0-5]\d([+-][0-2]\d:[0-5]\d|Z)"),
    "IP address": regex(r"((25[0-5]|2[0-4]\d|[01]?\d\d?)\.){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)"),
    "quoted text": regex(r'" *(?:[^\s"\\]|\\["n\\])(?: |[^\s"\\]|\\["n\\])*"'),
    "JSON object": json_schema(CHARACTER),
}


class Piece(BaseModel):
    """A part of `Hero`."""

    model_config = ConfigDict(extra="forbid")
    quality: Literal["Normal", "Magic", "Unique"]
    durability: int = Field(ge=0, le=999)


class Hero(BaseModel):
    """What both libraries can hold a text to."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["Warrior", "Rogue", "Sorcerer"]
    life: int = Field(ge=0, le=999)
    equipment: list[Piece] = Field(max_length=4)


class NamedHero(Hero):
    """The same with text of its own, of bounded length."""

    name: str = Field(max_length=40)


SUMS = """
start: t ("+" t){0,3}
t: "a" | "b" | "(" u ("+" u){0,3} ")"
u: "a" | "b" | "(" v ")"
v: "a" | "b"
"""


def measure(
    *,
    vocabulary: int = 32_000,
    repeats: int = 10,
    texts: int = 500,
    beams: tuple[int, ...] = (10, 20),
    titles_of: int | None = None,
    seed: int = 0,
    advance: Callable[[], object] = lambda: None,
) -> Row:
    """All parts, as plain values.

    Args:
        vocabulary: tokens of the tokenizer, if the titles yield so many.
        repeats: compilations, and walks, of each case.
        texts: of a random model, of each kind.
        beams: widths of the searches over titles.
        titles_of: most titles of a catalogue; all if None.
        seed: of everything.
        advance: called after each of `PARTS` parts.
    """
    catalogues, learned = _catalogues(seed)
    catalogues = {name: some[:titles_of] for name, some in catalogues.items()}
    titles = list(dict.fromkeys(title for some in catalogues.values() for title in some))
    tokenizer = TextTokenizer(byte_level_tokenizer([*titles, *learned], vocabulary))
    rng = np.random.default_rng(seed)
    backends = installed_backends()
    compilers = {name: GrammarCompiler(tokenizer, backend=name) for name in backends}
    source = " ".join(titles)[:2000]
    cases = TABLE_2 | {
        "substring of 2,000": substring_of(source),
        "slate of 10 from 50": delimited_subsequence(titles[:50], "; ", most=10),
    }
    found: Row = {"vocabulary": tokenizer.vocabulary_size, "backends": backends}
    found["catalogues"] = {name: len(some) for name, some in catalogues.items()}
    found["grammars"] = [
        {"case": name, "backend": backend, **_case(grammar, tokenizer, backend, repeats, rng)}
        for name, grammar in cases.items()
        for backend in backends
    ]
    advance()
    sizes = sorted({min(len(titles), n) for n in (1000, 10_000, len(titles))})
    found["titles"] = [row for n in sizes for row in _titles(titles[:n], tokenizer, backends, rng)]
    advance()
    found["valid"] = list(_valid(compilers, tokenizer, source, texts, seed))
    advance()
    found["written"] = [
        _written(name, some, tokenizer, width)
        for name, some in catalogues.items()
        for width in beams
    ]
    advance()
    kinds: dict[str, Callable[[], Constraint]] = {
        "titles": partial(TitleTrie.build, titles[:1000], tokenizer.tokens)
    }
    for backend, compiler in compilers.items():
        kinds[backend] = partial(compiler.constraint, structured(Hero))
    found["rewind"] = [_rewind(name, make, 10 * repeats, rng) for name, make in kinds.items()]
    advance()
    return found


def _catalogues(seed: int) -> tuple[dict[str, list[str]], list[str]]:
    """Titles of each catalogue, and other texts to train a tokenizer on."""
    movies = find_raw("movielens-latest-small-2016/movies.csv")
    places = find_raw("letter-yelp/Yelp.item.json")
    if movies is not None and places is not None:
        with movies.open(encoding="utf-8", newline="") as file:
            films = [row["title"] for row in csv.DictReader(file)]
        records = json.loads(places.read_text(encoding="utf-8")).values()
        return (
            {"MovieLens": films, "Yelp": [record["title"] for record in records]},
            [record["description"] for record in records],
        )
    rng = np.random.default_rng(seed)
    words = ["".join(chr(97 + c) for c in rng.integers(0, 26, n)) for n in rng.integers(2, 9, 800)]
    made = [" ".join(rng.choice(words, n)).title() for n in rng.integers(1, 6, 3000)]
    return {"made up": made}, []


def _walk(constraint: Constraint, rng: np.random.Generator, steps: int) -> list[float]:
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


def _case(
    grammar: Grammar,
    tokenizer: TextTokenizer,
    backend: BackendName,
    repeats: int,
    rng: np.random.Generator,
) -> Row:
    """Compile, again from the cache, and step; why not, where a library does not know it."""
    first, again, steps = [], [], []
    for _ in range(repeats):
        compiler = GrammarCompiler(tokenizer, backend=backend)
        start = time.perf_counter()
        try:
            compiler.constraint(grammar)
        except ValueError as error:
            return {"refused": str(error)}
        first.append(time.perf_counter() - start)
        start = time.perf_counter()
        constraint = compiler.constraint(grammar)
        again.append(time.perf_counter() - start)
        steps += _walk(constraint, rng, STEPS)
    return {
        "compile_ms": round(1e3 * float(np.median(first)), 3),
        "again_ms": round(1e3 * float(np.median(again)), 3),
        "step_us": round(1e6 * float(np.median(steps)), 1),
        "step_us_p99": round(1e6 * float(np.percentile(steps, 99)), 1),
    }


def _titles(
    titles: list[str],
    tokenizer: TextTokenizer,
    backends: list[BackendName],
    rng: np.random.Generator,
) -> Iterator[Row]:
    """The same titles as a trie, and as a choice of each library."""
    makers: dict[str, Callable[[], Constraint]] = {
        "trie": partial(TitleTrie.build, titles, tokenizer.tokens)
    }
    for backend in backends:
        compiler = GrammarCompiler(tokenizer, backend=backend)
        makers[f"choice, {backend}"] = partial(compiler.constraint, choice(titles))
    for way, make in makers.items():
        start = time.perf_counter()
        try:
            constraint = make()
        except ValueError as error:
            yield {"titles": len(titles), "way": way, "refused": str(error)}
            continue
        built = time.perf_counter() - start
        start = time.perf_counter()
        constraint.allowed([constraint.initial()])
        root = time.perf_counter() - start
        steps = _walk(constraint, rng, 500)
        yield {
            "titles": len(titles),
            "way": way,
            "build_s": round(built, 3),
            "first_mask_ms": round(1e3 * root, 2),
            "step_us": round(1e6 * float(np.median(steps)), 1),
        }


def _is_sum(text: str) -> bool:
    """Whether a text is of `SUMS`, brackets deeper than its own aside."""
    while (shorter := re.sub(r"\([ab](\+[ab])*\)", "a", text)) != text:
        text = shorter
    return re.fullmatch(r"[ab](\+[ab])*", text) is not None


def _reads(kind: type, text: str) -> bool:
    try:
        parse(kind, text)
    except ValueError:
        return False
    return True


def _valid(
    compilers: dict[BackendName, GrammarCompiler],
    tokenizer: TextTokenizer,
    source: str,
    texts: int,
    seed: int,
) -> Iterator[Row]:
    """Texts of a random model, how many are valid, and the forwards that they took."""
    cases: dict[str, tuple[Grammar, Callable[[str], bool]]] = {
        "JSON schema": (structured(Hero), partial(_reads, Hero)),
        "JSON schema, text": (structured(NamedHero), partial(_reads, NamedHero)),
        "grammar": (lark(SUMS), _is_sum),
        "substring": (substring_of(source), source.__contains__),
    }
    model = tiny_model("llama-gqa", tokenizer.vocabulary_size)
    for backend, compiler in compilers.items():
        for name, (grammar, is_valid) in cases.items():
            row: Row = {"case": name, "backend": backend}
            hits, rng = compiler.statistics.hits, np.random.default_rng(seed)
            written: list[SampledText] = []
            try:
                while len(written) < texts:
                    many = min(64, texts - len(written))
                    prompts = random_prompts(rng, many, 20, tokenizer.vocabulary_size)
                    constraints = [compiler.constraint(grammar) for _ in prompts]
                    written += sample_text(model, prompts, constraints, 600, seed=len(written))
            except ValueError as error:
                yield row | {"refused": str(error)}
                continue
            tokens = sum(len(text.tokens) for text in written)
            forwards = sum(text.stats.target_passes for text in written)
            whole = [tokenizer.decode(text.tokens) for text in written if text.finished]
            yield row | {
                "texts": texts,
                "valid": sum(map(is_valid, whole)),
                "tokens": tokens,
                "forwards": forwards,
                "saved": round(1 - forwards / tokens, 3),
                "cache_hits": compiler.statistics.hits - hits,
            }


def _written(name: str, titles: list[str], tokenizer: TextTokenizer, beams: int) -> Row:
    """Beam search over all titles with a random LLaMA: which of its answers are titles?"""
    model = tiny_model("llama-gqa", tokenizer.vocabulary_size, initializer_range=0.05)
    start = time.perf_counter()
    trie = TitleTrie.build(titles, tokenizer.tokens)
    built = time.perf_counter() - start
    shown = [titles[i : i + 5] for i in range(REQUESTS)]
    prompts = [np.asarray(tokenizer.encode("; ".join(some))) for some in shown]
    start = time.perf_counter()
    texts = generate_titles(model, prompts, trie, beams).texts
    seconds = time.perf_counter() - start
    found = [
        [tokenizer.decode(tokens[:n]) for tokens, n in zip(rows, lengths, strict=True) if n]
        for rows, lengths in zip(texts.tokens.tolist(), texts.lengths.tolist(), strict=True)
    ]
    known = set(titles)
    return {
        "catalogue": name,
        "titles": len(titles),
        "build_s": round(built, 3),
        "beams": beams,
        "asked": beams * REQUESTS,
        "written": sum(map(len, found)),
        "in_catalogue": sum(title in known for some in found for title in some),
        "repeated": sum(len(some) - len(set(some)) for some in found),
        "seconds": round(seconds, 2),
    }


def _rewind(name: str, make: Callable[[], Constraint], nodes: int, rng: np.random.Generator) -> Row:
    """A random draft tree: masks of all nodes in one call, against replays from the root."""
    grown = make()
    states = [grown.initial()]
    tokens: list[int] = []
    parents: list[int] = []
    while len(tokens) < nodes:
        parent = int(rng.integers(0, len(states))) if rng.random() < 0.3 else len(states) - 1
        options = np.flatnonzero(grown.allowed([states[parent]])[0])
        if not len(options):
            parent = 0
            options = np.flatnonzero(grown.allowed([states[0]])[0])
        tokens.append(int(rng.choice(options)))
        parents.append(parent - 1 if parent else ROOT)
        states.append(int(grown.advance([states[parent]], tokens[-1:])[0]))
    tree = make()
    masks = tree.allowed(tree_states(tree, tokens, parents))
    equal = 0
    replay = make()
    for node in range(nodes):
        path, at = [], node
        while at != ROOT:
            path.append(tokens[at])
            at = parents[at]
        state = replay.initial()
        for token in path[::-1]:
            state = int(replay.advance([state], [token])[0])
        equal += bool((replay.allowed([state])[0] == masks[node]).all())
    return {"constraint": name, "nodes": nodes, "equal": equal}
