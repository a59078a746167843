"""Packed weights: linear layers for answering on a CPU, their matrices laid out for its vectors.

oneDNN's products of a packed float32 matrix take half the time of BLAS's on processors that BLAS
does not know well, and none more elsewhere. What a row comes to does not depend on the rows beside
it, so an answer keeps its bits in every batch. Packed layers are for inference alone: the packing
does not follow a change of the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class PackedLinear(nn.Linear):
    """A linear layer of float32 on a CPU, with its weights as they were and a packed copy."""

    def __init__(self, plain: nn.Linear) -> None:
        """Pack the weights of `plain`, and share them."""
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta")
        self.weight, self.bias = plain.weight, plain.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input @ weight.T + bias`."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            input, self._packed, self.bias, "none", [], ""
        )
        return product


def pack(model: Any) -> Any:
    """`model` with its linear layers packed in place, where that is possible.

    Left alone are weights of other types or on other devices, layers that are no plain `nn.Linear`,
    and a torch without oneDNN.
    """
    if not (
        torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return model
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            fits = type(layer) is nn.Linear and layer.weight.dtype == torch.float32
            if fits and layer.weight.device.type == "cpu":
                setattr(parent, name, PackedLinear(layer).eval())
    return model
