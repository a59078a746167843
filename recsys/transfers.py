"""Copies between the host and a device: many small arrays in one copy.

On a GPU every copy costs more than the small arrays that a decode needs, and every copy to the host
waits for all that was queued. On a CPU nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
        self._added: list[tuple[torch.Tensor, NDArray[Any]]] = []

    def add(self, array: NDArray[Any]) -> torch.Tensor:
        """The tensor of an int64 or bool array, of its shape; on a CPU it shares its memory."""
        tensor = torch.from_numpy(array) if self._shares else self._place(array)
        self._added.append((tensor, array))
        return tensor

    def host(self, tensor: torch.Tensor) -> NDArray[Any]:
        """The array of a tensor that `add` returned; KeyError for another one."""
        for added, array in self._added:
            if added is tensor:
                return array
        raise KeyError("the tensor was not added to this upload")

    def _place(self, array: NDArray[Any]) -> torch.Tensor:
        """The tensor of an array that the next `send` copies."""
        kind, size = _TYPES[array.dtype], array.nbytes
        start = _aligned(self._used)
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


class FixedInputs:
    """Tensors of fixed shapes at fixed addresses, all filled by one copy.

    >>> like = {"a": np.arange(3), "b": np.array([True])}
    >>> inputs = FixedInputs(like, torch.empty(FixedInputs.size(like), dtype=torch.uint8))
    >>> inputs.send({"a": np.array([7, 8, 9]), "b": np.array([False])})
    >>> inputs["a"], inputs["b"]
    (tensor([7, 8, 9]), tensor([False]))
    """

    def __init__(self, like: Mapping[str, NDArray[Any]], memory: torch.Tensor) -> None:
        """Lay out tensors for int64 or bool arrays as in `like`, in uint8 `memory`."""
        self._memory, self._tensors = memory[: self.size(like)], {}
        self._starts: dict[str, int] = {}
        end = 0
        for name, array in like.items():
            start, end = end, end + array.nbytes
            self._starts[name] = start
            tensor = memory[start:end].view(_TYPES[array.dtype]).view(array.shape)
            self._tensors[name] = tensor
            end = _aligned(end)

    @staticmethod
    def size(like: Mapping[str, NDArray[Any]]) -> int:
        """Bytes of memory for such arrays."""
        return sum(_aligned(array.nbytes) for array in like.values())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def get(self, name: str) -> torch.Tensor | None:
        """The tensor of a name; None if there is none."""
        return self._tensors.get(name)

    def send(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Copy new values of all tensors; this does not wait for the device.

        ValueError if names, types or shapes are not those of the tensors.
        """
        host = torch.empty(
            len(self._memory), dtype=torch.uint8, pin_memory=self._memory.device.type == "cuda"
        )
        values = host.numpy()
        if arrays.keys() != self._tensors.keys():
            raise ValueError(f"want {list(self._tensors)}, got {list(arrays)}")
        for name, array in arrays.items():
            tensor, start = self._tensors[name], self._starts[name]
            if tensor.shape != array.shape or tensor.dtype != _TYPES[array.dtype]:
                raise ValueError(
                    f"{name}: want {tensor.dtype} {tuple(tensor.shape)}, got {array.dtype} "
                    f"{array.shape}"
                )
            bytes_ = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            values[start : start + array.nbytes] = bytes_
        self._memory.copy_(host, non_blocking=True)


def _aligned(size: int) -> int:
    """`size` rounded up, so that an array of any type may follow."""
    return -(-size // _ALIGNED) * _ALIGNED


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
    return unpack(pack(tensors).cpu(), tensors)


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(B, n) float64 with the values of all tensors, which are as in `download`."""
    parts = [t.flatten(1) if t.dim() > 1 else t.unsqueeze(1) for t in tensors]
    return torch.cat([part.to(torch.float64) for part in parts], dim=1)


def unpack(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that `pack` joined; those of `like` have their types and shapes."""
    columns = torch.split(packed, [math.prod(t.shape[1:]) for t in like], dim=1)
    return [column.to(t.dtype).reshape(t.shape) for column, t in zip(columns, like, strict=True)]
