"""Linear layers whose weights are packed once for the processor's matrix kernels.

oneDNN repacks a bf16 weight in plain layout on every call. With weights packed at load, the layers of SmolLM2-135M take
12 ms instead of 19 for one token and 267 ms instead of 338 for 512 (2 cores with AVX512-BF16). fp32 layers stay plain,
so that the engine is bit-equal to `transformers` in fp32.
"""

from __future__ import annotations

from typing import Any

import torch

# Number of rows that the packed layout is tuned for. Measured: layouts for 1 to 512 rows are equally fast.
_TYPICAL_ROWS = 32


class PackedLinear(torch.nn.Module):
    """y = x W^T + b with W [out_features, in_features] in the processor's own layout."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TYPICAL_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]. Returns [..., out_features]."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return output


def pack_linears(model: Any) -> int:
    """Replaces every bf16 linear layer of a CPU model. Returns the number of layers; 0 if oneDNN lacks bf16."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return 0
    packed = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if (
                type(child) is torch.nn.Linear
                and child.weight.device.type == "cpu"
                and child.weight.dtype == torch.bfloat16
            ):
                setattr(module, name, PackedLinear(child))
                packed += 1
    return packed
