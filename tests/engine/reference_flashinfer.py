"""What FlashInfer's documentation says its calls do, in plain torch: slow, one token and head at a time.

Every call is checked against the signature of the installed flashinfer, which imports on a CPU but runs on CUDA only.
"""

from __future__ import annotations

import inspect

import flashinfer
import torch

REAL_STEPS = flashinfer.BatchDecodeWithPagedKVCacheWrapper
REAL_CHUNKS = flashinfer.BatchPrefillWithPagedKVCacheWrapper


def fits(function, *arguments, **keywords):
    """Raises TypeError unless the installed flashinfer could be called so."""
    inspect.signature(function).bind(*arguments, **keywords)


def fits_plan(real, *arguments, **keywords):
    fits(real.plan, None, *arguments, **keywords)
    if hasattr(real, "_plan_impl"):  # behind a `plan` that takes any keyword
        fits(real._plan_impl, None, *arguments, **keywords)


def append_paged_kv_cache(
    append_key,
    append_value,
    batch_indices,
    positions,
    paged_kv_cache,
    kv_indices,
    kv_indptr,
    kv_last_page_len,
    **options,
):
    fits(
        flashinfer.append_paged_kv_cache,
        *(append_key, append_value, batch_indices, positions, paged_kv_cache),
        *(kv_indices, kv_indptr, kv_last_page_len),
        **options,
    )
    assert options == {"kv_layout": "HND"}
    assert append_key.is_contiguous() and append_value.is_contiguous()
    for tensor in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        assert tensor.dtype == torch.int32
    keys, values = paged_kv_cache
    assert keys.stride() == values.stride()
    page_size = keys.shape[2]
    for token, (sequence, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        page = int(kv_indices[int(kv_indptr[sequence]) + position // page_size])
        keys[page, :, position % page_size] = append_key[token]
        values[page, :, position % page_size] = append_value[token]


class _Wrapper:
    plans = runs = 0

    def _planned(self, query_lengths, indptr, indices, last_page_len, heads, page_size, options):
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        # Told from host memory, or FlashInfer would wait for the device to read them.
        assert indptr.device.type == last_page_len.device.type == "cpu"
        assert options["q_data_type"] == options["kv_data_type"]
        self.query_lengths, self.indptr, self.indices = query_lengths, indptr.tolist(), indices.tolist()
        self.last_page_len, self.heads, self.page_size, self.options = last_page_len.tolist(), heads, page_size, options

    def run(self, query, paged_kv_cache):
        fits(type(self).real.run, None, query, paged_kv_cache)
        self.runs += 1
        self._read_buffers()
        keys, values = paged_kv_cache
        num_query_heads, num_kv_heads, head_dim = self.heads
        assert query.shape == (sum(self.query_lengths), num_query_heads, head_dim) and query.is_contiguous()
        assert keys.shape[1:] == (num_kv_heads, self.page_size, head_dim)
        output, token = torch.empty_like(query), 0
        for sequence, new in enumerate(self.query_lengths):
            pages = self.indices[self.indptr[sequence] : self.indptr[sequence + 1]]
            length = (len(pages) - 1) * self.page_size + self.last_page_len[sequence]
            # [tokens, heads, dim]
            k, v = (
                cache[pages].transpose(1, 2).reshape(-1, num_kv_heads, head_dim)[:length] for cache in (keys, values)
            )
            for offset in range(new):
                position = length - new + offset  # causal: aligned at the end
                window = self.options["window_left"]
                first = 0 if window < 0 else max(0, position - window)
                for head in range(num_query_heads):
                    of = head * num_kv_heads // num_query_heads
                    scores = k[first : position + 1, of] @ query[token, head] * self.options["sm_scale"]
                    cap = self.options["logits_soft_cap"]
                    if cap:
                        scores = cap * torch.tanh(scores / cap)
                    output[token, head] = torch.softmax(scores, dim=0) @ v[first : position + 1, of]
                token += 1
        return output


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    real = REAL_STEPS

    def __init__(self, *arguments, **options):
        fits(REAL_STEPS.__init__, None, *arguments, **options)
        assert arguments[1] == "HND"
        self.buffers = options

    def _read_buffers(self):
        """Kernels that were recorded know nothing but these."""
        if self.buffers.get("use_cuda_graph"):
            self.indptr = self.buffers["paged_kv_indptr_buffer"].tolist()
            self.indices = self.buffers["paged_kv_indices_buffer"].tolist()
            self.last_page_len = self.buffers["paged_kv_last_page_len_buffer"].tolist()

    def plan(self, indptr, indices, last_page_len, num_query_heads, num_kv_heads, head_dim, page_size, **options):
        heads = (num_query_heads, num_kv_heads, head_dim)
        fits_plan(REAL_STEPS, indptr, indices, last_page_len, *heads, page_size, **options)
        self.plans += 1
        if self.buffers.get("use_cuda_graph"):
            # The kernels that are recorded read these; their sizes are fixed.
            self.buffers["paged_kv_indptr_buffer"].copy_(indptr)
            self.buffers["paged_kv_indices_buffer"][: len(indices)].copy_(indices)
            self.buffers["paged_kv_last_page_len_buffer"].copy_(last_page_len)
        self._planned([1] * len(last_page_len), indptr, indices, last_page_len, heads, page_size, options)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    real = REAL_CHUNKS

    def __init__(self, *arguments, **options):
        fits(REAL_CHUNKS.__init__, None, *arguments, **options)
        assert arguments[1] == "HND"
        self.buffers = options

    def _read_buffers(self):
        if self.buffers.get("use_cuda_graph"):
            self.query_lengths = self.buffers["qo_indptr_buf"].diff().tolist()
            self.indptr = self.buffers["paged_kv_indptr_buf"].tolist()
            self.indices = self.buffers["paged_kv_indices_buf"].tolist()
            self.last_page_len = self.buffers["paged_kv_last_page_len_buf"].tolist()

    def plan(self, query_indptr, indptr, indices, last_page_len, *heads_and_page_size, causal, **options):
        fits_plan(
            REAL_CHUNKS, query_indptr, indptr, indices, last_page_len, *heads_and_page_size, causal=causal, **options
        )
        assert causal
        self.plans += 1
        if self.buffers.get("use_cuda_graph"):
            self.buffers["qo_indptr_buf"].copy_(query_indptr)
            self.buffers["paged_kv_indptr_buf"].copy_(indptr)
            self.buffers["paged_kv_indices_buf"][: len(indices)].copy_(indices)
            self.buffers["paged_kv_last_page_len_buf"].copy_(last_page_len)
        *heads, page_size = heads_and_page_size
        lengths = query_indptr.diff().tolist()
        self._planned(lengths, indptr, indices, last_page_len, tuple(heads), page_size, options)
