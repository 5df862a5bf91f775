"""Tables of all known fields of OpenAI-compatible servers that kvferry does not serve.

A field is *served* (see `openai_models`), *harmless* (ignored because it can't change the output; HARMLESS has the
reason), or *refused* by name. null means "not given" for every field. A refused field passes if its value asks for the
default behaviour. A name in no table is refused too: it may be a typing error, or a field that changes the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rpc.errors import InvalidArgument

HARMLESS: Mapping[str, str] = {
    # OpenAI
    "user": "names the end user; the model never sees it",
    "safety_identifier": "names the end user; the model never sees it",
    "metadata": "labels for stored completions; nothing is stored",
    "store": "whether to store a copy; the output is the same",
    "service_tier": "price and speed class; there is only one",
    "prompt_cache_key": "hint for caches; cached prompts are found by content",
    "prompt_cache_retention": "how long to cache; the output is the same",
    "prompt_cache_options": "how to cache; the output is the same",
    "parallel_tool_calls": "only about tools, which are refused",
    "prediction": "a hint for speed; the output is the same",
    # OpenRouter, LiteLLM, LM Studio
    "cache_control": "hint for caches; prompts are cached anyway",
    "provider": "selects a host; there is only one",
    "route": "selects a host; there is only one",
    "trace": "labels for observability",
    "tags": "labels for observability",
    "session_id": "groups requests; cached prompts are found by content",
    "ttl": "when to unload the model; it always stays loaded",
    "keep_alive": "when to unload the model; it always stays loaded",
    "draft_model": "speculative decoding; the output is the same",
    "speculation": "speculative decoding; the output is the same",
    # vLLM
    "truncation_side": "only with truncate_prompt_tokens, which is refused",
    "guided_decoding_backend": "only with guided_*, which are refused",
    "guided_whitespace_pattern": "only with guided_json, which is refused",
    "media_io_kwargs": "only for images and audio, which are refused",
    "mm_processor_kwargs": "only for images and audio, which are refused",
    "stream_interval": "how many tokens per event; the text is the same",
    # SGLang
    "rid": "an id for logs; kvferry uses request_id",
    "custom_labels": "labels for metrics",
    "routed_dp_rank": "hint for routing; the router selects workers",
    "data_parallel_rank": "hint for routing; the router selects workers",
    "disagg_prefill_dp_rank": "hint for routing; the router selects workers",
    "stream_reasoning": "only with separated reasoning, which is refused",
    # llama.cpp, Ollama, TGI
    "cache_prompt": "whether to use cached pages; the output is the same",
    "n_cache_reuse": "how to use cached pages; the output is the same",
    "id_slot": "hint for routing; the router selects workers",
    "sse_ping_interval": "interval of empty lines in a stream that waits",
    "num_gpu": "placement of layers; set by the server",
    "main_gpu": "placement of layers; set by the server",
    "num_thread": "CPU threads; set by the server",
    "num_batch": "batch size; set by the server",
    "use_mmap": "how to load weights; they are loaded already",
    "use_mlock": "how to load weights; they are loaded already",
    "low_vram": "how to load weights; they are loaded already",
    "mirostat_tau": "only with mirostat, which is refused",
    "mirostat_eta": "only with mirostat, which is refused",
    "dynatemp_exponent": "only with dynatemp_range, which is refused",
    "dry_base": "only with dry_multiplier, which is refused",
    "dry_allowed_length": "only with dry_multiplier, which is refused",
    "dry_penalty_last_n": "only with dry_multiplier, which is refused",
    "dry_sequence_breakers": "only with dry_multiplier, which is refused",
    "xtc_threshold": "only with xtc_probability, which is refused",
}
"""Name of the field to the reason why the field can be ignored."""

_OFF_BOTH: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),  # {} turns the search on
    "moderation": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    # vLLM
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),  # -1 cuts at the model's limit
    "prompt_logprobs": (),  # 0 returns those of the prompt itself
    "logprob_token_ids": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "chat_template": ("",),
    "chat_template_kwargs": ({},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "structural_tag": ("",),
    "thinking_token_budget": (-1,),
    "include_reasoning": (True,),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "prompt_embeds": (),
    "detokenize": (True,),
    # SGLang
    "json_schema": (),
    "regex": ("",),
    "ebnf": ("",),
    "stop_regex": ("", []),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "lora_path": (),
    "session_params": ({},),
    "custom_params": ({},),
    "custom_logit_processor": ("",),
    "separate_reasoning": (False,),
    "input_ids": (),
    "reasoning": ({},),
    # llama.cpp, text-generation-webui
    "n_predict": (-1,),
    "n_keep": (0,),
    "n_probs": (0,),
    "min_keep": (0,),
    "samplers": (),
    "lora": ([],),
    "typical_p": (1,),
    "typ_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "smoothing_factor": (0,),
    "dynatemp_range": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "repeat_penalty": (1,),
    "repeat_last_n": (),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "guidance_scale": (1,),
    "negative_prompt": ("",),
    "grammar": ("",),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "reasoning_format": ("none",),
    "reasoning_budget": (-1,),
    # Ollama, TGI
    "options": ({},),
    "num_ctx": (),
    "num_predict": (-1,),
    "format": ("",),
    "raw": (False,),
    "template": ("",),
    "system": ("",),
    "think": (),
    "do_sample": (True,),
    "max_new_tokens": (),
    "truncate": (False,),
    "watermark": (False,),
    "adapter_id": ("",),
    "parameters": ({},),
    "inputs": (),
    # other hosts
    "thinking": (),
    "enable_thinking": (),
    "thinking_budget": (),
    "safe_prompt": (False,),
    "random_seed": (),
    "transforms": ([],),
    "plugins": ([],),
    "models": ([],),
    "max_output_tokens": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "stop_sequences": ([],),
    "input": (),
}
CHAT_REFUSED: Mapping[str, tuple[Any, ...]] = {**_OFF_BOTH, "prompt": (), "add_special_tokens": (False,)}
"""Names refused in chat completions, each with values that pass because they ask for the default behaviour."""
COMPLETION_REFUSED: Mapping[str, tuple[Any, ...]] = {
    **_OFF_BOTH,
    "messages": (),
    "max_completion_tokens": (),
    "top_logprobs": (0,),
    "add_special_tokens": (True,),
}
"""The same for completions."""
MESSAGE_HARMLESS: Mapping[str, str] = {
    "cache_control": "hint for caches",
    "id": "names the message",
    "annotations": "notes on an earlier response",
    "parsed": "the content as parsed by the client",
    "token_ids": "token ids of an earlier response",
    "provider_specific_fields": "a proxy's notes on an earlier response",
    "metadata": "labels",
    "weight": "only for training",
    "created_at": "not shown to the model",
    "timestamp": "not shown to the model",
}
MESSAGE_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "tool_call_id": ("",),
    "function_call": (),
    "refusal": ("",),
    "audio": (),
    "reasoning_content": ("",),
    "reasoning": ("",),
    "reasoning_details": ([],),
    "thinking": ("",),
    "thinking_blocks": ([],),
    "tools": ([],),
    "images": ([],),
    "prefix": (False,),
    "partial": (False,),
    "documents": ([],),
    "citations": ([],),
}
PART_HARMLESS: Mapping[str, str] = {
    "cache_control": "hint for caches",
    "prompt_cache_breakpoint": "hint for caches",
    "id": "names the part",
    "annotations": "notes on an earlier response",
}
STREAM_OPTIONS_HARMLESS: Mapping[str, str] = {
    "include_obfuscation": "padding against listeners; the text is the same",
    "continuous_usage_stats": "usage in every event; the text is the same",
}


def check_extras(
    extras: Mapping[str, Any] | None,
    harmless: Mapping[str, str],
    refused: Mapping[str, tuple[Any, ...]],
    where: str = "",
) -> None:
    """Raises InvalidArgument naming the first field that is not served.

    extras: fields that are not served, with their values. where: prefix of their names, for example "messages[0].".
    """
    for name, value in (extras or {}).items():
        if value is None or name in harmless or any(_is_same(value, off) for off in refused.get(name, ())):
            continue
        if name in refused:
            raise InvalidArgument(f"{where}{name}", "is not served", reason="unsupported_parameter")
        raise InvalidArgument(f"{where}{name}", "is not known", reason="unknown_parameter")


def _is_same(value: Any, other: Any) -> bool:
    """Whether values are equal; True and 1 are not."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
