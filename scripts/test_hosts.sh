#!/usr/bin/env bash
# Sparse models in the training loops of other libraries, with the real packages (make test-hosts):
#
#   PYTHON=.venv/bin/python VERSIONS=.versions scripts/test_hosts.sh
#
# The environment is made once, below VERSIONS (8 GB, with the CUDA libraries of torch), and kept; a
# change of scripts/hosts.txt makes it anew.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=$(realpath -s "${PYTHON:-.venv/bin/python}")
VERSIONS=${VERSIONS:-.versions}
mkdir -p "$VERSIONS"
directory=$(realpath "$VERSIONS")/hosts
python=$directory/bin/python
if ! cmp -s scripts/hosts.txt "$directory/hosts.txt"; then
    rm -rf "$directory"
    "$PYTHON" -m venv "$directory"
    "$python" -m pip install --quiet --upgrade pip
    "$python" -m pip install --quiet --editable . --requirement scripts/hosts.txt
    # litgpt asks for NumPy 1, which the others left behind, and runs with NumPy 2
    "$python" -m pip install --quiet --no-deps "litgpt>=0.5.13,<0.6"
    cp scripts/hosts.txt "$directory/hosts.txt"
fi
"$python" -m pip list 2>/dev/null | grep -E "^(accelerate|lightning|litgpt|nvidia-modelopt|timm|torch|torchao|torchtitan|transformers|trl) "
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONPATH=$PWD HF_HUB_OFFLINE=1
"$python" -m pytest -p no:cacheprovider --timeout 900 tests/suites/hosts tests/suites/integrations/test_callbacks.py
