"""Traces on the wire: the tree of a decode, with codes instead of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from recsys.decoding.output import Trace
from recsys.serving.schemas.recommendations import DecodedNode, DecodedTree


def trace_of(decoded: Trace, first_tokens: Sequence[int]) -> DecodedTree:
    """What a page draws, given the token of code 0 at each level."""
    nodes = [
        DecodedNode.model_construct(
            id=i,
            parent=node.parent,
            depth=node.depth,
            code=node.token - first_tokens[node.depth - 1],
            pass_=node.target_pass,
            draft_log_prob=node.draft_log_prob,
            target_log_prob=node.target_log_prob,
            fate=node.fate,
            items=node.items or 0,
        )
        for i, node in enumerate(decoded.nodes)
    ]
    return DecodedTree.model_construct(
        levels=len(first_tokens),
        passes=max((node.target_pass for node in decoded.nodes), default=0),
        nodes=nodes,
        blocked={str(level): count for level, count in decoded.blocked.items()},
    )
