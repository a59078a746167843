"""Decoding: constrained beam search, plain and speculative. Knows tokens and rows, no items."""

from recsys.decoding.beam import beam_search as beam_search
from recsys.decoding.completion import complete as complete
from recsys.decoding.draft import Drafter as Drafter
from recsys.decoding.draft import ExhaustiveDrafter as ExhaustiveDrafter
from recsys.decoding.draft import ModelDrafter as ModelDrafter
from recsys.decoding.draft import Proposal as Proposal
from recsys.decoding.engine import Decoded as Decoded
from recsys.decoding.engine import Engine as Engine
from recsys.decoding.output import Beams as Beams
from recsys.decoding.output import DecodeStats as DecodeStats
from recsys.decoding.planner import Plan as Plan
from recsys.decoding.request import Search as Search
from recsys.decoding.request import SearchRequest as SearchRequest
from recsys.decoding.score import score_rows as score_rows
from recsys.decoding.speculative import speculative_beam_search as speculative_beam_search
from recsys.modes import Mode as Mode
