"""Matrix products with weights of low precision, for the own forward (`recsys.models.llama`).

A pass over few tokens takes as long as reading the weights takes, so smaller weights are faster
where the device multiplies them directly. Each output of a matrix has a scale of its own:

- `float8`: weights and activations are float8 (e4m3fn, Micikevicius et al., 2022), with a scale for
  each row of the activations, too, which is computed in every pass. On a GPU
  `torch._scaled_mm` multiplies them; elsewhere they are dequantised, which is the reference.
- `int8`: only the weights are int8, symmetric around 0. A kernel converts them as it reads them;
  without it they are dequantised in every pass, which saves no time.
- `bfloat16`: weights and activations of a float32 model.

A copy is made once and does not follow later changes of the model's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch.nn import functional

Weights = Literal["float8", "int8", "bfloat16"]
"""Kinds of weights of low precision."""

FLOAT8 = torch.float8_e4m3fn
_MOST = {FLOAT8: 448.0, torch.int8: 127.0}
_CAPABILITY = (8, 9)  # of GPUs whose matrix units multiply float8
_TILE = 16  # `torch._scaled_mm` takes inputs and outputs in multiples of it


class Product(Protocol):
    """A matrix product with weights of any kind."""

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """(T, outputs) of (T, inputs), in their dtype."""


def quantize(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in a small dtype, and what to multiply them with.

    A row's largest value becomes the largest one of the dtype. In int8 no value changes by more
    than half a scale. In float8 none changes by more than a 16th of itself, or by more than 2^-10
    of a scale where that is larger.

    >>> whole, scale = quantize(torch.tensor([[-2.54, 0.02, 0.05]]), torch.int8)
    >>> whole.tolist(), [round(s, 4) for s in scale[0].tolist()]
    ([[-127, 1, 2]], [0.02])

    Args:
        rows: (n, m) of a floating-point dtype.
        dtype: `FLOAT8` or `torch.int8`.

    Returns:
        (n, m) of `dtype`, and (n, 1) float32 scales.
    """
    largest = torch.linalg.vector_norm(rows, torch.inf, dim=1, keepdim=True, dtype=torch.float32)
    scale = (largest / _MOST[dtype]).clamp_(min=torch.finfo(torch.float32).tiny)
    exact = rows / scale
    return (exact.round() if dtype == torch.int8 else exact).to(dtype), scale


@dataclass(frozen=True)
class Float8Linear:
    """A product of float8 matrices.

    Attributes:
        weight: (outputs, inputs) float8.
        scale: (1, outputs) float32.
        bias: (outputs,) or None.
        quantize_rows: of activations (`recsys.models.layers.quantize_float8`).
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None
    quantize_rows: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """(T, outputs) of (T, inputs), in their dtype."""
        rows, scale = self.quantize_rows(values)
        multiply = self._plain if values.device.type == "cpu" else self._scaled
        product = multiply(rows, scale, values.dtype)
        return product if self.bias is None else product + self.bias

    def _scaled(self, rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """On a GPU."""
        return torch._scaled_mm(
            rows, self.weight.t(), scale_a=scale, scale_b=self.scale, out_dtype=dtype
        )

    def _plain(self, rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same in plain torch."""
        return (functional.linear(rows.float(), self.weight.float()) * scale * self.scale).to(dtype)


@dataclass(frozen=True)
class Int8Linear:
    """A product with an int8 matrix, whose activations keep their dtype.

    Attributes:
        weight: (outputs, inputs) int8.
        scale: (1, outputs) float32.
        bias: (outputs,) or None.
        multiply: that computes the product (`recsys.models.layers.multiply_int8`).
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None
    multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """(T, outputs) of (T, inputs), in their dtype."""
        product = self.multiply(values, self.weight, self.scale)
        return product if self.bias is None else product + self.bias


@dataclass(frozen=True)
class Bfloat16Linear:
    """A product in bfloat16.

    Attributes:
        weight: (outputs, inputs) bfloat16.
        bias: (outputs,) or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """(T, outputs) of (T, inputs), in their dtype."""
        product = functional.linear(values.bfloat16(), self.weight).to(values.dtype)
        return product if self.bias is None else product + self.bias


def lower(
    weight: torch.Tensor, bias: torch.Tensor | None, weights: Weights, functions: Any
) -> Product:
    """The product with a copy of an (outputs, inputs) matrix, in low precision.

    `functions` are `recsys.models.layers` or `layer_kernels`.
    """
    if weights == "bfloat16":
        return Bfloat16Linear(weight.bfloat16(), bias)
    small, scale = quantize(weight, FLOAT8 if weights == "float8" else torch.int8)
    scale = scale.t().contiguous()
    if weights == "float8":
        return Float8Linear(small, scale, bias, functions.quantize_float8)
    return Int8Linear(small, scale, bias, functions.multiply_int8)


def reason_against(
    weights: Weights, device: torch.device, dtype: torch.dtype, sizes: list[tuple[int, int]]
) -> str | None:
    """Why matrices cannot be of this kind on a device; None if they can.

    Args:
        weights: the kind.
        device: of the model.
        dtype: of its weights.
        sizes: (outputs, inputs) of its matrices.
    """
    if weights not in get_args(Weights):
        return f"it is none of {', '.join(get_args(Weights))}"
    if device.type not in ("cuda", "cpu", "meta"):
        return f"the model is on {device.type!r}, and only a GPU of CUDA or a CPU can do this"
    if dtype == torch.float64 or (weights == "bfloat16" and dtype != torch.float32):
        return f"the model's own weights are {dtype}"
    if weights != "float8" or device.type == "cpu":
        return None
    if dtype != torch.bfloat16:
        return f"on a GPU the model has to be bfloat16, and its weights are {dtype}"
    for size in sizes:
        if size[0] % _TILE or size[1] % _TILE:
            return f"a matrix is {size[0]} x {size[1]}, and sizes must be multiples of {_TILE}"
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        return f"the GPU has compute capability {found[0]}.{found[1]}, and float8 needs 8.9"
    return None
