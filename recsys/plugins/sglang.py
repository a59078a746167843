"""The catalog as a custom logit processor of SGLang.

    RECSYS_BUNDLE=var/bundles/shop python -m sglang.launch_server \
      --model-path var/bundles/shop/target --skip-tokenizer-init \
      --enable-custom-logit-processor --disable-overlap-schedule

A request sends `"custom_logit_processor": CatalogProcessor.to_str()` and, among its sampling
parameters, `"custom_params": {}`: SGLang adds the request to them, as `__req__`. Written after the
documented interface, and tested with a double of it only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from recsys.plugins.next_tokens import of_environment

REQUEST = "__req__"


class CatalogProcessor(CustomLogitProcessor):  # type: ignore[misc] # as in `recsys.plugins.vllm`
    """Allows the tokens that continue a semantic ID of the catalog."""

    def __call__(
        self,
        logits: torch.Tensor,
        custom_param_list: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> torch.Tensor:
        """Mask (B, V) logits in place; row i belongs to the request in `custom_param_list[i]`.

        Raises:
            ValueError: a request without `custom_params`, whose tokens are not known.
        """
        parameters = custom_param_list or [None] * len(logits)
        if any(own is None or REQUEST not in own for own in parameters):
            raise ValueError("send the sampling parameter 'custom_params': {} with each request")
        generated = {row: own[REQUEST].output_ids for row, own in enumerate(parameters) if own}
        return of_environment().mask(logits, generated)
