"""Why an item was recommended: JSON in a fixed form, written by a language model.

Each answer names the item, titles of the history that it follows from, and a reason in words. The
first two can only be what they should be: the item is forced and costs no forward, and the titles
are chosen from the history. The reason is the model's own, at most so many characters; how true it
is, is the model's affair. Knows titles, and nothing of how the items were found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from recsys.errors import ArtifactError
from recsys.models.tree_forward import TreeModel
from recsys.text.grammar import Grammar, lark, subsequence_rules
from recsys.text.grammar_constraint import GrammarCompiler
from recsys.text.sample import SampledText, sample_text
from recsys.text.token_trie import TextTokenizer

PROMPT = "A customer liked: {history}.\nRecommended next: {item}.\nWhy, as JSON:\n"
_ESCAPED = 6  # bytes of the longest way to write a character: \u0000


@dataclass(frozen=True)
class Explanation:
    """Why one item was recommended.

    Attributes:
        item: its title.
        because: titles of the history, each once.
        reason: in words.
    """

    item: str
    because: list[str]
    reason: str


@dataclass(frozen=True)
class Explained:
    """An explanation and where it comes from.

    Attributes:
        explanation: the answer.
        json: its text, as it was written.
        written: tokens, and what they took.
    """

    explanation: Explanation
    json: str
    written: SampledText


_READER = TypeAdapter(Explanation)


class Explainer:
    """Writes explanations with one model; keeps compiled grammars, one of them from the start."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        prompt: str = PROMPT,
        longest_reason: int = 160,
        most_because: int = 3,
        longest_history: int = 10,
    ) -> None:
        """Prepare a model.

        Args:
            model: a Hugging Face decoder-only causal LM that writes text.
            tokenizer: its fast tokenizer.
            prompt: text in front, with `{history}` and `{item}`.
            longest_reason: characters.
            most_because: titles of the history that may be named, 0 for none.
            longest_history: titles that the model is shown, the last ones.

        Raises:
            ValueError: a limit out of its range, or a tokenizer that cannot serve.
        """
        for name, value, least in (
            ("longest_reason", longest_reason, 1),
            ("most_because", most_because, 0),
            ("longest_history", longest_history, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self._model = TreeModel.of(model)
        self._tokenizer = TextTokenizer(tokenizer, self._model.vocabulary_size)
        self._begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self._compiler = GrammarCompiler(self._tokenizer)
        self._prompt, self._longest_reason = prompt, longest_reason
        self._most_because, self._longest_history = most_because, longest_history
        self._compiler.warm_up([self._grammar(["a title"], "another")])

    @classmethod
    def load(cls, folder: Path, *, model: Any | None = None, **options: Any) -> Self:
        """Read a local checkpoint with its tokenizer, as a bundle's target may be.

        Args:
            folder: the checkpoint.
            model: the checkpoint's model, where it has been read already.
            **options: as `__init__`'s.

        Raises:
            ArtifactError: no loadable checkpoint, one without a tokenizer, which writes no text, or
                one whose tokenizer cannot serve.
        """
        from transformers import AutoTokenizer

        from recsys.models.checkpoint import load_model, quiet

        if not (folder / "tokenizer_config.json").is_file():
            raise ArtifactError(
                f"{folder} has no tokenizer, so it writes no text; only a text model explains: "
                "name one, a local Hugging Face folder, with --model"
            )
        try:
            with quiet():
                tokenizer = AutoTokenizer.from_pretrained(
                    os.fspath(folder), local_files_only=True, trust_remote_code=False
                )
            return cls(load_model(folder) if model is None else model, tokenizer, **options)
        except (OSError, ValueError) as error:
            said = " ".join(str(error).split())
            raise ArtifactError(f"{folder} cannot explain: {said}") from error

    def explain(
        self,
        history: Sequence[str],
        items: Sequence[str],
        *,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[Explained]:
        """Explain each of the items that one user was recommended.

        Args:
            history: titles that the user liked, oldest first.
            items: titles of the recommended items.
            temperature: 0 for the most probable words.
            seed: of the draws.

        Raises:
            ValueError: an item without a title.
        """
        if not all(items):
            raise ValueError(f"items: number {list(items).index('')} has no title")
        shown = list(dict.fromkeys(title for title in history if title))[-self._longest_history :]
        prompts = [
            self._begin
            + self._tokenizer.encode(
                self._prompt.format(history="; ".join(shown) or "nothing yet", item=item)
            )
            for item in items
        ]
        found = sample_text(
            self._model,
            prompts,
            [self._compiler.constraint(self._grammar(shown, item)) for item in items],
            max((self._longest(shown, item) for item in items), default=1),
            temperature=temperature,
            seed=seed,
        )
        texts = [self._tokenizer.decode(text.tokens) for text in found]
        return [
            Explained(_READER.validate_json(text), text, written)
            for text, written in zip(texts, found, strict=True)
        ]

    def _grammar(self, shown: list[str], item: str) -> Grammar:
        """What an answer looks like. That no title is named twice, no JSON schema can say."""
        titles = [json.dumps(title, ensure_ascii=False) for title in shown]
        most = min(self._most_because, len(titles))
        begin = f'{{"item":{json.dumps(item, ensure_ascii=False)},"because":['
        reason = {"type": "string", "minLength": 1, "maxLength": self._longest_reason}
        rules = [
            f'start: {json.dumps(begin, ensure_ascii=False)} because "],\\"reason\\":" reason "}}"',
            subsequence_rules("because", titles, ",", 0, most) if most else 'because: ""',
            f"reason: %json {json.dumps(reason)}",
        ]
        # of literals and one string: no terminals that may touch, as a stranger's grammar may have
        return replace(lark("\n".join(rules)), field="explanation")

    def _longest(self, shown: list[str], item: str) -> int:
        """Tokens that any answer fits into: each writes a byte at least, and one ends."""
        widest = sorted(shown, key=lambda title: len(json.dumps(title)))[-self._most_because :]
        frame = json.dumps({"item": item, "because": widest, "reason": ""})
        return len(frame) + _ESCAPED * self._longest_reason + 1
