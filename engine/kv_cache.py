"""The memory of a worker's KV pages: one tensor, page-major and head-major.

    [num_pages + NUM_TEST_PAGES, num_layers, 2, num_kv_heads, page_size, head_dim]

A page of all layers is one contiguous run, so one write moves it; a head slice of a layer is contiguous too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAGE_AXES = "layer,kv,head,token,dim"
MOST_LAYER_GROUPS = 4
"""Into so many parts, at most, a page can be cut to be sent layer by layer."""
NUM_TEST_PAGES = 4
"""Pages behind those of the pool that tests of connections are written to; no sequence ever has them."""


@dataclass(frozen=True)
class KvShape:
    """What one token's KV looks like in a model, found by running the model once."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class KvCache:
    """All KV pages of a worker."""

    def __init__(
        self, num_pages: int, page_size: int, shape: KvShape, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.num_pages, self.num_test_pages = num_pages, NUM_TEST_PAGES
        self.page_size = page_size
        self.shape = shape
        # Zeros, not uninitialised memory: attention multiplies padding by 0, and 0 * NaN is NaN.
        self.tensor = torch.zeros(
            (num_pages + NUM_TEST_PAGES, shape.num_layers, 2, shape.num_kv_heads, page_size, shape.head_dim),
            dtype=dtype,
            device=device,
        )

    @property
    def num_layer_groups(self) -> int:
        """Equal groups of neighbouring layers that a page can be sent in."""
        layers = self.shape.num_layers
        return next(n for n in range(min(MOST_LAYER_GROUPS, layers), 0, -1) if layers % n == 0)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers together."""
        return self.tensor[0].numel() * self.tensor.element_size()

    @property
    def base_address(self) -> int:
        """Address of page 0."""
        address: int = self.tensor.data_ptr()
        return address


def page_bytes(shape: KvShape, page_size: int, dtype: torch.dtype) -> int:
    """Bytes that one page of this shape takes, all layers together."""
    size: int = torch.empty((), dtype=dtype).element_size()
    return shape.num_layers * 2 * shape.num_kv_heads * page_size * shape.head_dim * size
