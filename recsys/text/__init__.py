"""Text: titles, grammars and free text under beam search or sampling, for language models.

A model that writes text keeps its own tokenizer. A `Constraint` says which tokens may follow, and
`generate_text` and `sample_text` obey it. The recommender does not import this package; only
the text model of a service does.
"""

from recsys.text.beam import BeamSettings as BeamSettings
from recsys.text.beam import Texts as Texts
from recsys.text.beam import generate_text as generate_text
from recsys.text.constraint import Constraint as Constraint
from recsys.text.grammar import Grammar as Grammar
from recsys.text.grammar import choice as choice
from recsys.text.grammar import json_schema as json_schema
from recsys.text.grammar import lark as lark
from recsys.text.grammar import regex as regex
from recsys.text.grammar_constraint import GrammarCompiler as GrammarCompiler
from recsys.text.grammar_constraint import GrammarConstraint as GrammarConstraint
from recsys.text.sample import SampledText as SampledText
from recsys.text.sample import sample_text as sample_text
from recsys.text.text_model import TextModel as TextModel
from recsys.text.titles import TitleBeams as TitleBeams
from recsys.text.titles import Titles as Titles
from recsys.text.titles import generate_titles as generate_titles
from recsys.text.tokenizer import TextTokenizer as TextTokenizer
