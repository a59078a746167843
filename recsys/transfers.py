"""Copies between the host and a device: many small arrays in one copy.

On a GPU every copy costs more than the small arrays that a decode needs, and every copy to the host
waits for all that was queued. On a CPU nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ROOM = 1 << 18  # bytes of one copy; larger arrays get a copy of their own
_ALIGNED = 8
_TYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.bool_): torch.bool}


class Upload:
    """Host arrays on their way to a device.

    `add` returns an array's tensor at once, and `send` copies the values of all that were added
    since the last call. Until then the tensors must not be read.

    >>> upload = Upload(torch.device("cpu"))
    >>> tensor = upload.add(np.arange(3))
    >>> upload.send()
    >>> tensor
    tensor([0, 1, 2])

    Attributes:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device | str) -> None:
        """Prepare a copy to `device`; nothing is allocated before it is needed."""
        self.device = torch.device(device)
        self._shares = shares_memory(self.device)
        self._host: torch.Tensor | None = None
        self._there: torch.Tensor | None = None
        self._used = self._sent = 0

    def add(self, array: NDArray[Any]) -> torch.Tensor:
        """The tensor of an int64 or bool array, of its shape; on a CPU it shares its memory."""
        if self._shares:
            return torch.from_numpy(array)
        kind, size = _TYPES[array.dtype], array.nbytes
        start = -(-self._used // _ALIGNED) * _ALIGNED
        if self._host is None or self._there is None or start + size > len(self._host):
            self.send()
            room, start = max(ROOM, size), 0
            pinned = self.device.type == "cuda"
            self._host = torch.empty(room, dtype=torch.uint8, pin_memory=pinned)
            self._there = torch.empty(room, dtype=torch.uint8, device=self.device)
            self._sent = 0
        self._used = start + size
        bytes_ = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._host.numpy()[start : self._used] = bytes_
        return self._there[start : self._used].view(kind).view(array.shape)

    def send(self) -> None:
        """Copy what was added since the last call; this does not wait for the device."""
        if self._host is None or self._there is None or self._used == self._sent:
            return
        new = slice(self._sent, self._used)
        self._there[new].copy_(self._host[new], non_blocking=True)
        self._sent = self._used


def shares_memory(device: torch.device) -> bool:
    """Whether tensors on `device` are in the memory of the host, so that nothing is copied."""
    return device.type == "cpu"


def download(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of one device on the host, by one copy; this waits for the device.

    Args:
        tensors: (B, ...) each, with the same B; floats, bools, or integers below 2^53.
    """
    if not tensors or shares_memory(tensors[0].device):
        return list(tensors)
    parts = [t.flatten(1) if t.dim() > 1 else t.unsqueeze(1) for t in tensors]
    packed = torch.cat([part.to(torch.float64) for part in parts], dim=1).cpu()
    columns = torch.split(packed, [math.prod(t.shape[1:]) for t in tensors], dim=1)
    return [column.to(t.dtype).reshape(t.shape) for column, t in zip(columns, tensors, strict=True)]
