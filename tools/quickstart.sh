#!/usr/bin/env bash
# From nothing to a trained model in a few minutes: an environment in ./.venv, then `python -m llmq.quickstart`.
# NVIDIA's libraries come along where there is a GPU that can be used; with --cpu they do not, and it is left alone.
set -u
cd "$(dirname "$0")/.."
. tools/python.sh

cuda=--cuda
for argument in "$@"; do
    [ "$argument" = --cpu ] && cuda=
done
# Nothing is written outside of .venv and out/quickstart: no package cache, no compiled files beside the sources.
PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 "$python" -m llmq.environment .venv --extra plot $cuda || exit
PYTHONPYCACHEPREFIX="$PWD/.venv/pycache" exec .venv/bin/python -m llmq.quickstart "$@"
