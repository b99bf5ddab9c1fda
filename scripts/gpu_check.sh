#!/usr/bin/env bash
# Everything that only a GPU can show, in parts of at most ten minutes each:
#
#   scripts/gpu_check.sh [tests|kernels|layers|train|all]
#
#   tests    the kernels against their references, bit for bit; layers compiled and in bf16
#   kernels  kernels against the reference, other formulations and a device copy
#   layers   one linear layer of every method against nn.Linear
#   train    50 steps of GPT-2 124M with every method, beside dense
#
# Runs from a bare checkout: needs bash, Python ≥ 3.11 with torch, triton, numpy, pytest, rich and
# pyyaml; nothing is installed or downloaded. Results go to ${OUT:-benchmarks/results}.
#
#   PYTHON=python3.12 OUT=/tmp/results scripts/gpu_check.sh kernels
#   QUICK=1 …   fewer rounds and shapes: does it run?
#   CHECK=1 …   rehearse on the CPU: tiny sizes, kernels interpreted, no figure means anything
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results}
CHECK=${CHECK:-0}
QUICK=${QUICK:-$CHECK}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE
failed=()

run() { # name of the part, command: a failure does not keep the other parts from running
    local part=$1 start=$SECONDS
    shift
    echo "== $part: $*"
    if "$@"; then
        echo "== $part: done in $((SECONDS - start)) s"
    else
        echo "== $part: FAILED after $((SECONDS - start)) s"
        failed+=("$part")
    fi
}

environment() {
    if command -v nvidia-smi > /dev/null; then
        nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem --format=csv
    fi
    "$PYTHON" - << 'PY'
import sys
import torch
import triton

where = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA GPU"
print(f"python {sys.version.split()[0]}, torch {torch.__version__}, triton {triton.__version__}, {where}")
PY
}

bench() { # suite, name of the JSON
    run "$1" "$PYTHON" -m sparsepretrain bench "suite=$1" "out=$OUT/$2.json" "quick=$quick"
}

tests() {
    if [ "$CHECK" = 1 ]; then
        run "tests/gpu, rehearsed" env SPARSEPRETRAIN_TEST_DEVICE=cpu TRITON_INTERPRET=1 \
            "$PYTHON" -m pytest -q -rs tests/gpu
        return
    fi
    run "tests/gpu" "$PYTHON" -m pytest -q -rs tests/gpu
    run "tests/kernels_triton" env SPARSEPRETRAIN_TEST_DEVICE=cuda \
        "$PYTHON" -m pytest -q -rs tests/kernels_triton
}

kernels() { bench kernels gpu_kernels; }
layers() { bench linear gpu_layers; }
train() { bench steps gpu_steps; }

part=${1:-all}
case $part in
    tests | kernels | layers | train) parts=("$part") ;;
    all) parts=(tests kernels layers train) ;;
    *)
        echo "gpu_check: unknown part '$part'; one of tests, kernels, layers, train, all" >&2
        exit 2
        ;;
esac
if [ "$CHECK" = 1 ]; then
    export CUDA_VISIBLE_DEVICES=
elif ! "$PYTHON" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "gpu_check: no CUDA GPU here; CHECK=1 rehearses on the CPU" >&2
    exit 1
fi
quick=false
if [ "$QUICK" = 1 ]; then quick=true; fi
mkdir -p "$OUT"
environment
for part in "${parts[@]}"; do "$part"; done
if [ ${#failed[@]} -gt 0 ]; then
    echo "gpu_check: failed: ${failed[*]}" >&2
    exit 1
fi
echo "gpu_check: all parts passed; results in $OUT"
