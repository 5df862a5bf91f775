"""Microbenchmarks of kvferry's parts: `make bench-engine`, and so on. Not part of `kvferry bench`."""
