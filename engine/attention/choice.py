"""Selects the attention backend of a worker."""

from __future__ import annotations

import logging

from engine.attention import flashinfer
from engine.attention.base import AttentionBackend
from engine.attention.native_decode import native_attention
from engine.attention.torch_paged import TorchPagedAttention
from engine.config import AttentionName
from engine.errors import ModelLoadError
from engine.kv_cache import KvCache
from engine.loader import LoadedModel

log = logging.getLogger(__name__)


def choose_attention(loaded: LoadedModel, kv_cache: KvCache, name: AttentionName = "auto") -> AttentionBackend:
    """The backend called `name`; "auto" is the fastest backend that can run here. No page of the cache may be in use.

    Raises ModelLoadError if the named backend can't run.
    """
    if name == "torch":
        return TorchPagedAttention(kv_cache)
    if name == "auto" and kv_cache.tensor.device.type == "cpu":
        return native_attention(kv_cache, loaded.num_query_heads) or TorchPagedAttention(kv_cache)
    reason = flashinfer.why_not(kv_cache)
    if reason is None:
        try:
            backend = flashinfer.FlashInferAttention(kv_cache, loaded.num_query_heads, loaded.attention_options)
            # Build the kernels now and not during a request: the first build takes minutes.
            backend.warm_up()
            return backend
        except Exception as error:
            reason = f"its kernels can't be built or run here: {error}"
    if name == "flashinfer":
        raise ModelLoadError(f"--attention flashinfer: {reason}")
    log.warning("attention runs in plain torch, which is slow on a GPU", extra={"reason": f"FlashInfer: {reason}"})
    return TorchPagedAttention(kv_cache)
