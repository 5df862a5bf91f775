"""RMS norms in one compiled pass instead of eight torch operations. SmolLM2-135M has 61 RMS norms."""

from __future__ import annotations

from typing import Any

import torch

from engine.native.library import load_kernels

# Attribute names of epsilon in the norms of transformers models.
_EPSILON_NAMES = ("variance_epsilon", "eps")


class NativeRmsNorm(torch.nn.Module):
    """y = weight * x / sqrt(mean(x^2) + epsilon), in bf16, rounded where `transformers` rounds."""

    def __init__(self, weight: torch.Tensor, epsilon: float, kernels: Any) -> None:
        super().__init__()
        self.weight, self._epsilon, self._kernels = weight, epsilon, kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., width] bf16. Returns the same shape."""
        x = x.contiguous()
        y = torch.empty_like(x)
        width = x.shape[-1]
        self._kernels.kvferry_rms_norm(
            x.data_ptr(), self.weight.data_ptr(), y.data_ptr(), x.numel() // width, width, self._epsilon
        )
        return y


def replace_rms_norms(model: Any) -> int:
    """Replaces every norm of a bf16 CPU model for which the kernel gives the same numbers. Returns their number.

    Equality is tested on random input, not guessed from class names. A norm that computes something else (a weight
    of 1 + w, a subtracted mean) is not replaced.
    """
    kernels = load_kernels()
    if kernels is None:
        return 0
    replaced = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            native = _candidate(child, kernels)
            if native is not None and _gives_the_same(child, native):
                setattr(module, name, native)
                replaced += 1
    return replaced


def _candidate(norm: Any, kernels: Any) -> NativeRmsNorm | None:
    weight = getattr(norm, "weight", None)
    epsilon = next((getattr(norm, name) for name in _EPSILON_NAMES if hasattr(norm, name)), None)
    if not isinstance(weight, torch.Tensor) or not isinstance(epsilon, float) or weight.dim() != 1:
        return None
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or not weight.is_contiguous():
        return None
    return NativeRmsNorm(weight.detach(), epsilon, kernels)


@torch.inference_mode()
def _gives_the_same(norm: Any, native: NativeRmsNorm) -> bool:
    """Whether results are equal, except the last bit of a few elements: sums are computed in another order."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((17, native.weight.numel()), generator=generator).to(torch.bfloat16) * 3
    try:
        expected = norm(x)
    except (TypeError, RuntimeError):
        return False
    found = native(x)
    if not isinstance(expected, torch.Tensor) or expected.dtype != found.dtype or expected.shape != found.shape:
        return False
    nearly_all = bool((expected == found).float().mean() > 0.99)
    return nearly_all and torch.allclose(expected.float(), found.float(), rtol=2**-7, atol=1e-6)
