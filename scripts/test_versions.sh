#!/usr/bin/env bash
# The declared minimum of torch, a version between, and other versions of Triton and Hydra (make test-versions):
#
#   PYTHON=.venv/bin/python VERSIONS=.versions scripts/test_versions.sh
#
# In an environment per version of torch: every kernel through the stub driver, matmuls on fake CUDA
# tensors, layers, torch.compile, and a short training run. Versions of Triton alone: the stub driver.
# Versions of Hydra alone: configurations and the command line.
# Environments are made once, below VERSIONS (5 to 8 GB each, with the CUDA libraries of torch), and
# kept. Ends with versions and counts.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=$(realpath -s "${PYTHON:-.venv/bin/python}") # with the development tools and the newest torch
VERSIONS=${VERSIONS:-.versions}
mkdir -p "$VERSIONS"
VERSIONS=$(realpath "$VERSIONS")
MINIMUM=$("$PYTHON" -c 'import re; print(re.search(r"\"torch>=([\d.]+)\"", open("pyproject.toml").read())[1])')
TORCH=("$MINIMUM.0" 2.11.0) # they bring Triton 3.5 and 3.6
TRITON=(3.8.0)
HYDRA=(1.4.0rc3)
LAYERS=(tests/sparsity/methods/test_golden_layers.py tests/sparsity/methods/test_golden_methods.py)
COMPILE=(tests/sparsity/engine/test_compile.py tests/training/test_compilation.py -k "not vit_nano and not resnet_nano")
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONPATH=$PWD
summary=() failed=0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

check() { # label, command
    local label=$1 code=0
    shift
    echo "== $label"
    "$@" 2>&1 | tee "$scratch/output" || code=$?
    if [ "$code" = 0 ]; then
        summary+=("$label: $(grep -oE '[0-9]+ passed.*' "$scratch/output" | tail -n 1 || echo ok)")
    else
        summary+=("$label: FAILED, $(grep -oE '[0-9]+ (failed|error).*' "$scratch/output" | tail -n 1 || echo "exit code $code")")
        failed=1
    fi
}

versions() { "$1" -c 'import torch, triton; print(f"torch {torch.__version__}, Triton {triton.__version__}")'; }

for version in "${TORCH[@]}"; do
    directory=$VERSIONS/torch-$version
    python=$directory/bin/python
    if [ ! -e "$directory/.complete" ]; then
        "$PYTHON" -m venv "$directory"
        "$python" -m pip install --quiet --upgrade pip
        "$python" -m pip install --quiet --editable . "torch==$version" pytest pytest-timeout
        touch "$directory/.complete"
    fi
    name=$(versions "$python")
    pytest=("$python" -m pytest -p no:cacheprovider --timeout 900)
    where=tests/suites/stub_driver
    # fake CUDA tensors of torch 2.9 ask the driver
    if [ "$version" = "$MINIMUM.0" ]; then where+=/test_stub_driver.py; fi
    check "$name, kernels" "${pytest[@]}" "$where"
    check "$name, layers" "${pytest[@]}" "${LAYERS[@]}"
    check "$name, torch.compile" "${pytest[@]}" "${COMPILE[@]}"
    for mode in none blocks; do
        check "$name, training, compile=$mode" "$python" -m sparsepretrain train "compile=$mode" \
            steps=20 schedule.warmup=5 eval.batches=1 model.n_layer=2 tracker=jsonl parallel.device=cpu \
            "runs_dir='$scratch/torch-$version-$mode'"
    done
done

for version in "${TRITON[@]}"; do
    directory=$VERSIONS/triton-$version
    if [ ! -e "$directory/triton" ]; then
        "$PYTHON" -m pip install --quiet --no-deps --target "$directory" "triton==$version"
    fi
    export PYTHONPATH=$directory:$PWD
    check "$(versions "$PYTHON"), kernels" \
        "$PYTHON" -m pytest -p no:cacheprovider tests/suites/stub_driver/test_stub_driver.py
done

for version in "${HYDRA[@]}"; do
    directory=$VERSIONS/hydra-core-$version
    if [ ! -e "$directory/hydra" ]; then
        "$PYTHON" -m pip install --quiet --target "$directory" "hydra-core==$version"
    fi
    export PYTHONPATH=$directory:$PWD
    check "Hydra $version, configurations" \
        "$PYTHON" -m pytest -p no:cacheprovider tests/config tests/cli --ignore tests/cli/test_wheel.py
done

echo
printf '%s\n' "${summary[@]}"
exit "$failed"
