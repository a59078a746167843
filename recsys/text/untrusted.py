"""Grammars from untrusted clients: refused, or compiled and followed in bounded time and memory.

llguidance counts the work of compiling and of each step (`LIMITS`), and fetches no reference. What
escapes its count is bounded by a process of its own (`recsys.text.parser_process`).
"""

from __future__ import annotations

import json
from typing import Any

from recsys.text.grammar import Grammar, json_schema
from recsys.text.grammar_constraint import GrammarConstraint, check_parser
from recsys.text.parser_process import ParserProcess
from recsys.text.token_trie import TextTokenizer

LONGEST_SCHEMA = 4096
"""Most characters of a schema, written without white space."""
LIMITS = {"verbose_errors": False, "max_lexer_states": 50_000}


class UntrustedCompiler:
    """Compiles a grammar at a time; the constraint of the one before is of no use then."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        """Use a tokenizer; the process starts with the first grammar."""
        self._tokenizer, self._process = tokenizer, ParserProcess(tokenizer, LIMITS)

    def constraint(self, grammar: Grammar) -> GrammarConstraint:
        """Make a constraint for one search.

        Raises:
            ValueError: the grammar is malformed, matches no text, or takes too much to compile; the
                message begins with the constructor's name. The constraint raises the same if a step
                takes too much.
        """
        parser = self._process.compile(grammar)
        check_parser(parser, grammar.field)
        return GrammarConstraint(parser, self._tokenizer, grammar.field)

    def close(self) -> None:
        """End the process."""
        self._process.close()


def untrusted_schema(schema: dict[str, Any]) -> Grammar:
    """JSON of a schema, as `json_schema`.

    Raises:
        ValueError: as of `json_schema`, or it is too long or too deep.
    """
    try:
        size = len(json.dumps(schema, ensure_ascii=False, separators=(",", ":")))
    except RecursionError:
        raise ValueError("json_schema: has too many levels") from None
    if size > LONGEST_SCHEMA:
        raise ValueError(
            f"json_schema: must have at most {LONGEST_SCHEMA} characters without white space, "
            f"got {size}"
        )
    return json_schema(schema)
