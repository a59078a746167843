"""BatchConstraint: the constraints of a batch, between tensors on a device and states on the host.

Every request may have its own constraint. Requests that share one are answered in one call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from recsys.text.constraint import Constraint


class BatchConstraint:
    """Constraints of B requests.

    Attributes:
        end_tokens: end tokens, the same for all constraints.
        constraints: one per request.
    """

    def __init__(
        self,
        constraint: Constraint | Sequence[Constraint],
        batch: int,
        vocabulary_size: int,
        device: torch.device,
    ) -> None:
        """Take one constraint for all B requests, or one each, for a model of V tokens.

        Tokens beyond those of a constraint are not allowed.

        Raises:
            ValueError: wrong number of constraints, different end tokens, or a constraint with
                more tokens than the model.
        """
        shared = not isinstance(constraint, (list, tuple))
        self.constraints: list[Constraint] = (
            [constraint] * batch if shared else list(constraint)  # type: ignore[list-item, arg-type]
        )
        if len(self.constraints) != batch:
            raise ValueError(f"{len(self.constraints)} constraints for {batch} prompts")
        ends = {c.end_tokens for c in self.constraints}
        if len(ends) > 1:
            raise ValueError(f"constraints of one batch differ in their end tokens: {sorted(ends)}")
        for c in self.constraints:
            if c.vocabulary_size > vocabulary_size:
                raise ValueError(
                    f"the constraint has {c.vocabulary_size} tokens, the model {vocabulary_size}"
                )
        self.end_tokens = ends.pop() if ends else ()
        self._vocabulary, self._device = vocabulary_size, device
        groups: dict[int, tuple[Constraint, list[int]]] = {}
        for request, c in enumerate(self.constraints):
            groups.setdefault(id(c), (c, []))[1].append(request)
        self._groups = list(groups.values())

    def initial(self, width: int) -> torch.Tensor:
        """(B, width) initial states."""
        states = [[c.initial()] * width for c in self.constraints]
        shape = (len(states), width)
        return torch.tensor(states, dtype=torch.int64, device=self._device).view(shape)

    def allowed(self, states: torch.Tensor) -> torch.Tensor:
        """(B, W, V) whether each token may follow each of (B, W) states."""
        host = states.cpu().numpy()
        mask = np.zeros((*host.shape, self._vocabulary), np.bool_)
        for c, requests in self._groups:
            here = c.allowed(host[requests].reshape(-1))
            mask[requests, :, : here.shape[1]] = here.reshape(len(requests), -1, here.shape[1])
        return torch.from_numpy(mask).to(self._device)

    def advance(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """(B, W) states after (B, W) tokens; `DEAD` after a token that is not allowed."""
        before, taken = torch.stack([states, tokens]).cpu().numpy()
        after = np.empty_like(before)
        for c, requests in self._groups:
            inside = taken[requests].reshape(-1) < c.vocabulary_size
            found = c.advance(before[requests].reshape(-1), taken[requests].reshape(-1) * inside)
            after[requests] = np.where(inside, found, -1).reshape(len(requests), -1)
        return torch.from_numpy(after).to(self._device)

    def merge_keys(self, states: torch.Tensor) -> torch.Tensor:
        """(B, W) merge keys of (B, W) states."""
        host = states.cpu().numpy()
        keys = np.empty_like(host)
        for c, requests in self._groups:
            keys[requests] = c.merge_keys(host[requests].reshape(-1)).reshape(len(requests), -1)
        return torch.from_numpy(keys).to(self._device)

    def best(
        self, total: torch.Tensor, states: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The M = `count` best continuations of each request with distinct merge keys.

        They are chosen from (B, K * V) scores, -inf for those not allowed, behind (B, K) states.

        Returns:
            (B, M) scores, best first, -inf if there are fewer; indices in `total`; states.
        """
        vocabulary = total.shape[1] // states.shape[1]
        many = count
        while True:
            scores, column = total.topk(min(many, total.shape[1]))
            after = self.advance(states.gather(1, column // vocabulary), column % vocabulary)
            scores = scores.masked_fill(repeated(self.merge_keys(after), scores), -torch.inf)
            short = (scores > -torch.inf).sum(1) < count
            more = total.gather(1, column[:, -1:])[:, 0] > -torch.inf
            if many >= total.shape[1] or not (short & more).any():
                break
            many *= 4
        scores, order = scores.sort(descending=True, stable=True)
        scores, order = scores[:, :count], order[:, :count]
        return scores, column.gather(1, order), after.gather(1, order)


def repeated(keys: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """(B, M) whether a better entry of the same request has the same key; ties go to the first."""
    ranked = scores.sort(dim=1, descending=True, stable=True).indices
    ordered, order = keys.gather(1, ranked).sort(dim=1, stable=True)
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(again).scatter(1, ranked.gather(1, order), again)
