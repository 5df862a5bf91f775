"""Our servers against vLLM for CPU and llama.cpp, under one load on the same cores: `make bench-peers`."""
