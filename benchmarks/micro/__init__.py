"""Measurements of kvferry's parts for those who work on it: `make bench-engine`, and so on. No part of
`kvferry bench`."""
