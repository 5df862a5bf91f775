#!/bin/sh
# Generates the Python code beside the .proto files; with --check only compares it. Run from the repository root.
set -eu
out=.
if [ "${1:-}" = "--check" ]; then
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
fi
python -m grpc_tools.protoc -I. \
    --python_out="$out" --mypy_out="quiet:$out" --grpc_python_out="$out" --mypy_grpc_out="quiet:$out" \
    protos/kv.proto protos/inference.proto protos/worker.proto
if [ "$out" != . ]; then
    for generated in "$out"/protos/*; do
        cmp "$generated" "protos/$(basename "$generated")" || {
            echo "generated code is out of date: run 'make protos'" >&2
            exit 1
        }
    done
fi
