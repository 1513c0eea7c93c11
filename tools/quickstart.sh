#!/usr/bin/env bash
# From nothing to a trained model in a few minutes: an environment in ./.venv, then tools/quickstart.py in it.
set -u
cd "$(dirname "$0")/.." || exit
. tools/python.sh

cuda=--cuda cache="$PWD/out/quickstart/cache"
for argument in "$@"; do
    case $argument in
    --cpu) cuda= ;;
    --show-resume | --version) ;;
    *) echo "usage: bash tools/quickstart.sh [--cpu] [--show-resume] [--version]
  --cpu          train on the CPU, also where a GPU could be used, and leave out NVIDIA's libraries
  --show-resume  then train again, kill it midway, resume, and compare the weights bit by bit
  --version      show which versions are installed"
        case $argument in -h | --help) exit ;; *) echo "error: $argument is no option" >&2; exit 2 ;; esac ;;
    esac
done
# Nothing is written outside of .venv and out/quickstart: no package cache, no kernels in the home folder.
export PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 PYTHONPYCACHEPREFIX="$PWD/.venv/pycache"
export LLMQ_CACHE_DIR="${LLMQ_CACHE_DIR:-$cache/llmq}" MPLCONFIGDIR="${MPLCONFIGDIR:-$cache/matplotlib}"
export CUPY_CACHE_DIR="${CUPY_CACHE_DIR:-$cache/cupy}" CUDA_CACHE_PATH="${CUDA_CACHE_PATH:-$cache/driver}"
# One BLAS thread: two are 16% faster on two idle cores, and 10 times slower and more beside other work.
export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" VECLIB_MAXIMUM_THREADS=1
echo "\$ $python tools/environment.py .venv --extra plot $cuda"
PYTHONDONTWRITEBYTECODE=1 "$python" tools/environment.py .venv --extra plot $cuda || exit
case " $* " in *" --version "*) exec .venv/bin/llmq-train --version ;; esac
exec .venv/bin/python tools/quickstart.py "$@"
