"""Why an item was recommended: JSON in a fixed form, written by a language model.

An answer contains the item, titles of the history, and a reason in words. A grammar forces the
item, which costs no forward pass, and restricts the titles to those of the history. The reason is
free text of bounded length; nothing checks that it is true.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from typing import Any, Self

from pydantic import TypeAdapter

from recsys.errors import ArtifactError
from recsys.models.tree_forward import TreeModel
from recsys.text.grammar import Grammar, lark, literal, subsequence_rules
from recsys.text.grammar_constraint import GrammarCompiler
from recsys.text.sample import SampledText, sample_text
from recsys.text.token_trie import TextTokenizer

PROMPT = "A customer liked: {history}.\nRecommended next: {item}.\nWhy, as JSON:\n"
_ESCAPED = 6  # most bytes of a character in JSON: \u0000


@dataclass(frozen=True)
class Explanation:
    """Why one item was recommended.

    Attributes:
        item: title of the item.
        because: titles of the history, each once.
        reason: the reason in words.
    """

    item: str
    because: list[str]
    reason: str


@dataclass(frozen=True)
class Explained:
    """An explanation, the JSON it was read from, and the tokens written with their cost."""

    explanation: Explanation
    json: str
    written: SampledText


_READER = TypeAdapter(Explanation)


class Explainer:
    """Writes explanations with one language model.

    Attributes:
        model: the model.
        tokenizer: its tokenizer.
    """

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
            prompt: text of the prompt, with `{history}` and `{item}`.
            longest_reason: most characters of a reason.
            most_because: most titles of the history in an explanation.
            longest_history: most titles in the prompt, the last ones of the history.

        Raises:
            ValueError: a limit out of its range, or a tokenizer that is not supported.
        """
        for name, value, least in (
            ("longest_reason", longest_reason, 1),
            ("most_because", most_because, 0),
            ("longest_history", longest_history, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self.model = TreeModel.of(model)
        self.tokenizer = TextTokenizer(tokenizer, self.model.vocabulary_size)
        self._begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self._compiler = GrammarCompiler(self.tokenizer)
        self._prompt, self._longest_reason = prompt, longest_reason
        self._most_because, self._longest_history = most_because, longest_history
        self._compiler.warm_up([self._grammar(["a title"], "another")])

    @classmethod
    def load(cls, folder: Path, *, model: Any | None = None, **options: Any) -> Self:
        """Read a local checkpoint with its tokenizer, such as a bundle's target.

        The checkpoint's `model` may have been loaded already; `options` are the constructor's.

        Raises:
            ArtifactError: the checkpoint cannot be loaded, has no tokenizer, or has one that is not
                supported.
        """
        from transformers import AutoTokenizer

        from recsys.models.checkpoint import load_model, quiet

        if not (folder / "tokenizer_config.json").is_file():
            raise ArtifactError(
                f"{folder} has no tokenizer, so it writes no text; only a text model explains: "
                "name one, a local Hugging Face folder, with a service's serve.explainer"
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

    def encode(self, prompt: str) -> list[int]:
        """Tokens of a prompt that somebody else wrote, behind the token that begins texts.

        The names of special tokens in the prompt, such as `</s>`, are text.
        """
        return self._begin + self.tokenizer.encode_plain(prompt)

    def explain(
        self,
        history: Sequence[str],
        items: Sequence[str],
        *,
        temperature: float = 0.0,
        seed: int = 0,
        stopped: Callable[[], bool] | None = None,
    ) -> list[Explained]:
        """Explain each of the items that one user was recommended.

        Args:
            history: titles that the user liked, oldest first.
            items: titles of the recommended items.
            temperature: temperature of sampling; 0 takes the most probable tokens.
            seed: seed of the draws.
            stopped: whether to write no further; asked before each pass.

        Raises:
            ValueError: an item without a title.
            RequestError: the titles are longer than the model reads.
            StoppedError: `stopped` returned True.
        """
        if not all(items):
            raise ValueError(f"items: number {list(items).index('')} has no title")
        shown = list(dict.fromkeys(title for title in history if title))[-self._longest_history :]
        told = "; ".join(shown) or "nothing yet"
        prompts = [self._begin + self._fill(told, item) for item in items]
        found = sample_text(
            self.model,
            prompts,
            [self._compiler.constraint(self._grammar(shown, item)) for item in items],
            max((self._longest(shown, item) for item in items), default=1),
            temperature=temperature,
            seed=seed,
            stopped=stopped,
        )
        texts = [self.tokenizer.decode(text.tokens) for text in found]
        return [
            Explained(_READER.validate_json(text), text, written)
            for text, written in zip(texts, found, strict=True)
        ]

    def _fill(self, history: str, item: str) -> list[int]:
        """Tokens of the prompt.

        A template may have special tokens. In titles, their names are text: a title with `</s>`
        neither ends the prompt nor says who speaks.
        """
        if not self.tokenizer.names_special(f"{history}\n{item}"):
            return self.tokenizer.encode(self._prompt.format(history=history, item=item))
        titles, tokens = {"history": history, "item": item}, []
        for text, name, *_ in Formatter().parse(self._prompt):
            tokens += self.tokenizer.encode(text)
            if name is not None:
                tokens += self.tokenizer.encode_plain(titles[name])
        return tokens

    def _grammar(self, shown: list[str], item: str) -> Grammar:
        """The grammar of an answer. A JSON schema cannot express that titles do not repeat."""
        titles = [json.dumps(title, ensure_ascii=False) for title in shown]
        most = min(self._most_because, len(titles))
        begin = f'{{"item":{json.dumps(item, ensure_ascii=False)},"because":['
        reason = {"type": "string", "minLength": 1, "maxLength": self._longest_reason}
        rules = [
            f'start: {literal(begin)} because "],\\"reason\\":" reason "}}"',
            subsequence_rules("because", titles, ",", 0, most) if most else 'because: ""',
            f"reason: %json {json.dumps(reason)}",
        ]
        # Literals and one string: the grammar has no adjacent terminals, so `forced` is safe.
        return replace(lark("\n".join(rules)), field="explanation")

    def _longest(self, shown: list[str], item: str) -> int:
        """Upper bound on the tokens of an answer: at most one per byte, and the end token."""
        widest = sorted(shown, key=lambda title: len(json.dumps(title)))[-self._most_because :]
        frame = json.dumps({"item": item, "because": widest, "reason": ""})
        return len(frame) + _ESCAPED * self._longest_reason + 1
