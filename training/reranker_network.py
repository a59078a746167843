"""Trains the network of the reranker on users whose next item is among their candidates.

The network's output is added to the linear score; the loss is the cross-entropy of the next item
among the candidates. It starts at 0, so that training begins with the linear reranker.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recsys.retrieval.reranker import Network

UNITS = 64
EPOCHS = 20
USERS = 128  # of a step
LEARNING_RATE = 5e-3  # falls linearly to 0
WEIGHT_DECAY = 2.0
DROPOUT = 0.2
NOTHING = -1e9  # score of a place without a candidate
CONSTANT = 1e-6  # a feature whose standard deviation is a lower share of its mean is not read


def fit_network(
    names: Sequence[str],
    features: NDArray[np.float32],
    there: NDArray[np.bool_],
    chosen: NDArray[np.integer],
    linear: NDArray[np.float64],
) -> Network:
    """The network that raises the likelihood of the next items most, within its regularisation.

    The same arguments give the same bits on one machine.

    Args:
        names: of the F features.
        features: (n, w, F) of n users' candidates.
        there: (n, w) which places hold a candidate.
        chosen: (n,) the place of each user's next item.
        linear: (n, w) scores to which the network's are added.
    """
    real = features[there].astype(np.float64)
    mean, scale = real.mean(axis=0), real.std(axis=0)
    varies = scale > CONSTANT * np.abs(mean)
    known = np.divide(1, scale, out=np.zeros_like(scale), where=varies)
    scaled = np.zeros(features.shape, np.float32)
    scaled[there] = (real - mean) * known
    inputs = torch.from_numpy(scaled)
    base = torch.from_numpy(np.where(there, linear, NOTHING).astype(np.float32))
    targets = torch.from_numpy(np.asarray(chosen, np.int64))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inner, outer = nn.Linear(len(names), UNITS), nn.Linear(UNITS, 1, bias=False)
        nn.init.zeros_(outer.weight)
        drop, keep = nn.Dropout(DROPOUT), torch.ones(USERS, 1, UNITS)
        parameters = [*inner.parameters(), *outer.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        steps = EPOCHS * -(-len(targets) // USERS)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        for _ in range(EPOCHS):
            for rows in torch.split(torch.randperm(len(targets)), USERS):
                # a unit is dropped for all candidates of a user: drawing random numbers for each
                # candidate took more than half of the time, and gained nothing
                units = torch.relu(inner(inputs[rows])) * drop(keep[: len(rows)])
                scores = base[rows] + outer(units)[..., 0]
                loss = nn.functional.cross_entropy(scores, targets[rows])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
    weights, bias, out = (
        part.detach().double().numpy() for part in (inner.weight, inner.bias, outer.weight)
    )
    weights = weights * known  # of features as they are
    bias = bias - weights @ mean
    return Network(tuple(names), np.column_stack([weights, bias, out[0]]))
