"""Packed weights: linear layers for answering on a CPU, their matrices laid out for its vectors.

oneDNN's products of a packed float32 matrix take half the time of BLAS's on processors that BLAS
does not know well, and none more elsewhere. What a row comes to does not depend on the rows beside
it, so an answer keeps its bits in every batch. Packed layers are for inference alone: the packing
does not follow a change of the weights.

oneDNN writes a program of half a megabyte for every number of rows that it meets, and takes longer
over it than over the product. So rows go through it in blocks, the last one filled up, of 42 sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_BLOCK = 4096  # rows at a time; a multiple of the steps
_STEPS = ((128, 16), (512, 64), (_BLOCK, 128))  # up to so many rows: filled up to a multiple of


class PackedLinear(nn.Linear):
    """A linear layer of float32 on a CPU, with its weights as they were and a packed copy."""

    def __init__(self, plain: nn.Linear) -> None:
        """Pack the weights of `plain`, and share them."""
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta")
        self.weight, self.bias = plain.weight, plain.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input @ weight.T + bias`."""
        rows = input.reshape(-1, self.in_features)
        if len(rows) <= _BLOCK:
            product = self._product(rows)
        else:
            product = torch.cat([self._product(block) for block in torch.split(rows, _BLOCK)])
        return product.view(*input.shape[:-1], self.out_features)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        count = len(rows)
        step = next(step for most, step in _STEPS if count <= most)
        if missing := -count % step:
            rows = nn.functional.pad(rows, (0, 0, 0, missing))
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self.bias, "none", [], ""
        )
        return product[:count]


def pack(model: Any) -> Any:
    """`model` with its linear layers packed in place, where that is possible.

    Left alone are weights of other types or on other devices, layers that are no plain `nn.Linear`,
    and a torch without oneDNN.
    """
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return model
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            fits = type(layer) is nn.Linear and layer.weight.dtype == torch.float32
            if fits and layer.weight.device.type == "cpu":
                setattr(parent, name, PackedLinear(layer).eval())
    return model
