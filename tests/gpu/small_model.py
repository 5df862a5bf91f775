"""Sizes of a model that runs in a moment and still has heads, layers and chunks as real ones have."""

SMALL = {
    "vocab_size": 2048,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
}
