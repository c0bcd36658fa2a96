#!/usr/bin/env bash
# Make the gRPC code from the .proto; with --check, only tell whether the code that is checked in is that.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/.venv/bin
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
PATH="$venv:$PATH" "$venv/python" -m grpc_tools.protoc -I. --python_out="$work" --grpc_python_out="$work" \
  --mypy_out=quiet:"$work" tasks/protocol/inference.proto
for file in inference_pb2.py inference_pb2.pyi inference_pb2_grpc.py; do
  if [ "${1:-}" = --check ]; then
    cmp -s "$work/tasks/protocol/$file" "tasks/protocol/$file" ||
      { echo "tasks/protocol/$file is not what inference.proto makes: run \`make proto\`" >&2; exit 1; }
  else
    cp "$work/tasks/protocol/$file" "tasks/protocol/$file"
  fi
done
