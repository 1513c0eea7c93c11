#!/usr/bin/env bash
# From nothing to a trained model in a few minutes: an environment in ./.venv, then `python -m llmq.quickstart`.
# NVIDIA's libraries come along where there is a GPU that can be used; with --cpu they do not, and it is left alone.
set -u
cd "$(dirname "$0")/.."
. tools/python.sh

cuda=--cuda
for argument in "$@"; do
    case $argument in
    --cpu) cuda= ;;
    --show-resume | --version) ;;
    -h | --help)
        echo "usage: bash tools/quickstart.sh [--cpu] [--show-resume] [--version]"
        echo "  --cpu          train on the CPU, also where a GPU could be used, and leave out NVIDIA's libraries"
        echo "  --show-resume  then train again, kill it midway, go on, and compare the weights bit by bit"
        echo "  --version      say which versions are installed"
        exit
        ;;
    *)
        echo "error: $argument is no option: there are --cpu, --show-resume and --version" >&2
        exit 2
        ;;
    esac
done
# Nothing is written outside of .venv and out/quickstart: no package cache, no compiled files beside the sources.
PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 "$python" -m llmq.quickstart.environment .venv --extra plot $cuda || exit
PYTHONPYCACHEPREFIX="$PWD/.venv/pycache" exec .venv/bin/python -m llmq.quickstart "$@"
