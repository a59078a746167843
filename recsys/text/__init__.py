"""Text: titles, grammars and free text under beam search or sampling, for language models.

A model that writes text keeps its own tokenizer. A `Constraint` says which tokens may follow, and
`generate_text` and `sample_text` obey it. The recommender does not import this package; only
the text model of a service does.
"""

from __future__ import annotations

from recsys.text.beam import BeamSettings, Texts, generate_text
from recsys.text.constraint import Constraint
from recsys.text.grammar import Grammar, choice, json_schema, lark, regex
from recsys.text.grammar_constraint import GrammarCompiler, GrammarConstraint
from recsys.text.sample import SampledText, sample_text
from recsys.text.text_model import TextModel
from recsys.text.titles import TitleBeams, Titles, generate_titles
from recsys.text.tokenizer import TextTokenizer

__all__ = [
    "BeamSettings",
    "Constraint",
    "Grammar",
    "GrammarCompiler",
    "GrammarConstraint",
    "SampledText",
    "TextModel",
    "TextTokenizer",
    "Texts",
    "TitleBeams",
    "Titles",
    "choice",
    "generate_text",
    "generate_titles",
    "json_schema",
    "lark",
    "regex",
    "sample_text",
]
