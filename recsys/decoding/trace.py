"""Trace: how one answer was found, as data for a picture of the decode."""

from __future__ import annotations

import torch

from recsys.decoding.expand import Frontier
from recsys.decoding.table import PADDING, Table
from recsys.modes import Fate, Trace, TraceNode


def trace(table: Table, done: torch.Tensor, num_beams: int, levels: list[Frontier]) -> list[Trace]:
    """Traces of the requests at (d,) places in the table's batch, which are done.

    `levels` is the draft tree, for the original batch.
    """
    beams = _beams(table, num_beams)
    states, parents, depth = (x[done] for x in (table.states, table.parents, table.depth))
    tokens = table.step.trie.tokens_of(states.masked_fill(states == PADDING, 0))
    scores = table.log_probs()[done].double()
    drafted = [level.log_probs[table.request[done]].double() for level in levels]
    draft = torch.cat(drafted, dim=1) if drafted else scores[:, :0]
    is_beam = (beams[done][:, None, :] == states[:, :, None]).any(-1)
    runs = torch.tensor(table.runs, device=states.device)
    passes = torch.searchsorted(runs, torch.arange(table.places, device=states.device), right=True)
    real = (states != PADDING) & (depth > 0)
    number = torch.cumsum(real, 1) - 1
    above = torch.where(parents == 0, -1, number.gather(1, parents))
    # one copy to the host of each; a line a place of a request
    columns = [x.tolist() for x in (above, depth, tokens, states, scores, is_beam, real)]
    pass_of, drafted_scores = passes.tolist(), draft.tolist()
    traces = []
    for draft_line, *lines in zip(drafted_scores, *columns, strict=True):
        first_patch, nodes_ = 1 + len(draft_line), []
        for node, (parent, level, token, state, score, beam, is_node) in enumerate(
            zip(*lines, strict=True)
        ):
            if is_node:
                draft_score = draft_line[node - 1] if node < first_patch else None
                fate: Fate = "rejected"
                if beam:
                    fate = "accepted" if pass_of[node] == 0 else "patched"
                in_pass = pass_of[node] + 1
                nodes_.append(
                    TraceNode(parent, level, token, state, in_pass, draft_score, score, fate)
                )
        traces.append(Trace(nodes_))
    return traces


def _beams(table: Table, num_beams: int) -> torch.Tensor:
    """(b, (L - 1) K) states of all beams of the search; some may be missing if it is not done."""
    step = table.step
    dtype, device = table.logits.total.dtype, table.states.device
    frontier = Frontier.root(len(table.request), dtype, device)
    states = []
    for depth in range(step.levels - 1):
        position, _ = table.find(frontier.states)
        frontier = step.expand(frontier, table.logits.at(position), depth, num_beams)
        states.append(frontier.states)
    return torch.cat(states, dim=1) if states else table.states[:, :0]
