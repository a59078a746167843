"""Packed weights: linear layers for inference on a CPU, with matrices in oneDNN's own layout.

On processors that BLAS supports badly, oneDNN's products with a packed float32 matrix take half the
time of BLAS's, and elsewhere no more. A row of the product does not depend on the other rows, so an
answer has the same bits in every batch. Packed layers are for inference only, because the packed
copy does not follow changes of the weights.

oneDNN generates half a megabyte of code for every number of rows, which takes longer than the
product. So rows are processed in blocks that are padded to one of 42 sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from recsys.native.coverage import runs_natively

_BLOCK = 4096  # rows of a block; a multiple of the steps
_STEPS = ((128, 16), (512, 64), (_BLOCK, 128))  # (most rows, they are padded to a multiple of)


class PackedLinear(nn.Linear):
    """A float32 linear layer on a CPU, with its weights and a packed copy of them."""

    def __init__(self, plain: nn.Linear) -> None:
        """Share the weights of `plain` and pack a copy."""
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
    """Pack the linear layers of `model` in place where possible, and return it.

    A model that the native forward runs (`recsys.native`) has its own packed copy and is left
    unchanged. So are weights of other types or on other devices, subclasses of `nn.Linear`, and
    everything if torch was built without oneDNN.
    """
    if runs_natively(model) or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return model
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            fits = type(layer) is nn.Linear and layer.weight.dtype == torch.float32
            if fits and layer.weight.device.type == "cpu":
                setattr(parent, name, PackedLinear(layer).eval())
    return model
