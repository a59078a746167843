"""TensorConstraint: a constraint between the tensors of a search and its states on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from recsys.errors import NonFiniteError
from recsys.text.constraint import Constraint

T = TypeVar("T")


class TensorConstraint:
    """The constraint of one request; tensors have an axis of 1 in front.

    Attributes:
        end_tokens: as of the constraint.
    """

    def __init__(self, constraint: Constraint, vocabulary_size: int, device: torch.device) -> None:
        """Take a constraint for a model of V tokens; those that it does not have are refused."""
        self._constraint, self.end_tokens = constraint, constraint.end_tokens
        self._vocabulary, self._device = vocabulary_size, device

    def initial(self, width: int) -> torch.Tensor:
        """(1, width) initial states."""
        return torch.full((1, width), self._constraint.initial(), device=self._device)

    def allowed(self, states: torch.Tensor) -> torch.Tensor:
        """(1, W, V) whether each token may follow each of (1, W) states."""
        here = self._constraint.allowed(states[0].cpu().numpy())
        mask = np.zeros((1, len(here), self._vocabulary), np.bool_)
        mask[0, :, : here.shape[1]] = here
        return torch.from_numpy(mask).to(self._device)

    def advance(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """(1, W) states after (1, W) tokens; `DEAD` after a token that is not allowed."""
        before, taken = torch.cat([states, tokens]).cpu().numpy()
        inside = taken < self._constraint.vocabulary_size
        after = self._constraint.advance(before, taken * inside)
        return torch.from_numpy(np.where(inside, after, -1)).to(self._device)[None]

    def merge_keys(self, states: torch.Tensor) -> torch.Tensor:
        """(1, W) merge keys of (1, W) states."""
        keys = self._constraint.merge_keys(states[0].cpu().numpy())
        return torch.from_numpy(keys).to(self._device)[None]

    def best(
        self, total: torch.Tensor, states: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The M = `count` best continuations with distinct merge keys.

        They are chosen from (1, K * V) scores, -inf for those not allowed, behind (1, K) states.

        Returns:
            (1, M) scores, best first, -inf if there are fewer; indices in `total`; states.
        """
        vocabulary = total.shape[1] // states.shape[1]
        many = count
        while True:
            scores, column = total.topk(min(many, total.shape[1]))
            after = self.advance(states.gather(1, column // vocabulary), column % vocabulary)
            scores = scores.masked_fill(repeated(self.merge_keys(after), scores), -torch.inf)
            short = int((scores > -torch.inf).sum()) < count
            if not short or many >= total.shape[1] or total[0, column[0, -1]] == -torch.inf:
                break
            many *= 4
        scores, order = scores.sort(descending=True, stable=True)
        scores, order = scores[:, :count], order[:, :count]
        return scores, column.gather(1, order), after.gather(1, order)


def repeated(keys: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """(1, M) whether a better entry has the same key; ties go to the first."""
    ranked = scores.sort(dim=1, descending=True, stable=True).indices
    ordered, order = keys.gather(1, ranked).sort(dim=1, stable=True)
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(again).scatter(1, ranked.gather(1, order), again)


def one_each(
    constraint: Constraint | Sequence[Constraint], requests: int, vocabulary_size: int
) -> list[Constraint]:
    """The constraints of some requests, for a model of so many tokens.

    Args:
        constraint: one for all requests, or a list with one each.
        requests: their number.
        vocabulary_size: of the model.

    Raises:
        ValueError: wrong number of constraints, or one with more tokens than the model.
    """
    shared = not isinstance(constraint, (list, tuple))
    constraints: list[Constraint] = (
        [constraint] * requests if shared else list(constraint)  # type: ignore[list-item, arg-type]
    )
    if len(constraints) != requests:
        raise ValueError(f"{len(constraints)} constraints for {requests} prompts")
    for own in constraints:
        if own.vocabulary_size > vocabulary_size:
            raise ValueError(
                f"the constraint has {own.vocabulary_size} tokens, the model {vocabulary_size}"
            )
    return constraints


def answer_each(requests: int, answer: Callable[[int], T]) -> list[T]:
    """The answers to requests 0, 1, ..., one after the other.

    Raises:
        NonFiniteError: with the numbers of all requests whose `answer` raises it.
    """
    answers, failed = [], []
    for number in range(requests):
        try:
            answers.append(answer(number))
        except NonFiniteError:
            failed.append(number)
    if failed:
        raise NonFiniteError(failed)
    return answers
