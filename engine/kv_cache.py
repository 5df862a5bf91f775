"""The memory of a worker's KV pages: one tensor, page-major and head-major.

    [num_pages + NUM_TEST_PAGES, num_layers, 2, num_kv_heads, page_size, head_dim]

The bytes of a page are contiguous over all layers, so one write moves a page. One head of one layer is contiguous too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine import huge_pages

PAGE_AXES = "layer,kv,head,token,dim"
MOST_LAYER_GROUPS = 4
"""Most parts into which a page is split to be sent layer by layer."""
NUM_TEST_PAGES = 4
"""Pages after those of the pool. Connection tests write to these pages; no sequence ever holds them."""


@dataclass(frozen=True)
class KvShape:
    """Shape of one token's KV in a model, found by running the model once."""

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
        # Zeros, not uninitialized memory: attention multiplies padding by 0, and 0 * NaN is NaN.
        sizes = (num_pages + NUM_TEST_PAGES, shape.num_layers, 2, shape.num_kv_heads, page_size, shape.head_dim)
        on_host = torch.device(device).type == "cpu"
        self.tensor = huge_pages.zeros(sizes, dtype) if on_host else torch.zeros(sizes, dtype=dtype, device=device)

    @property
    def num_layer_groups(self) -> int:
        """Number of equal groups of consecutive layers in which a page can be sent."""
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
