#!/usr/bin/env bash
# Rehearse the calls of scripts/gpu/run.py as a bare GPU machine would run them, without a GPU:
#
#   scripts/gpu/rehearse.sh [CALL …]        all three: 5 minutes on two cores (make rehearse-gpu)
#
# An environment of its own with torch 2.11 and its Triton, without Hydra, W&B and datasets; a copy
# of the committed files without .git; no network; nothing installed. Checks that a call whose stage
# is killed loses that stage only, that a machine without the carried wheels is told so at once, and
# that at most eight files come back.
#   TORCH=2.13.0     another version of torch
#   VERSIONS=DIR     where the environment is made once and kept (5 GB)
set -euo pipefail
cd "$(dirname "$0")/../.."

TORCH=${TORCH:-2.11.0}
VERSIONS=$(realpath -m "${VERSIONS:-.versions}")
for PYTHON in python3.12 "$HOME"/.pyenv/versions/3.12.*/bin/python python3; do
    "$PYTHON" -c "" 2> /dev/null && break # pyenv's python3.12 is there even if it is not enabled
done
PACKAGES=(numpy transformers tokenizers safetensors numba scipy scikit-learn pyyaml rich matplotlib markdown-it-py
    timm pillow sacrebleu hypothesis pytest pytest-xdist pytest-timeout)
calls=("$@")
if [ ${#calls[@]} = 0 ]; then calls=(1 2 3); fi

environment=$VERSIONS/bare-torch-$TORCH
if [ ! -e "$environment/.complete" ]; then
    "$PYTHON" -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet --upgrade pip
    "$environment/bin/python" -m pip install --quiet "torch==$TORCH" torchvision "${PACKAGES[@]}"
    touch "$environment/.complete"
fi
PYTHON=.venv/bin/python scripts/gpu/prepare.sh

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/checkout" "$scratch/home" "$scratch/tmp"
git archive HEAD | tar -x -C "$scratch/checkout"
isolated=(unshare --net --map-root-user)
if ! "${isolated[@]}" true 2> /dev/null; then
    echo "rehearse.sh: unshare cannot cut off the network here; stages could use it" >&2
    isolated=()
fi

run() { # OUT, words of run.py
    local out=$1
    shift
    (cd "$scratch/checkout" && "${isolated[@]}" env -i HOME="$scratch/home" TMPDIR="$scratch/tmp" \
        PATH="$environment/bin:/usr/bin:/bin" OMP_NUM_THREADS=1 \
        python3 scripts/gpu/run.py "$@" --rehearse --out "$out" --files 8)
}

fail() {
    echo "rehearse.sh: $1" >&2
    exit 1
}

echo "== without the carried wheels"
code=0
run "$scratch/bare" facts > "$scratch/bare.log" 2>&1 || code=$?
if [ "$code" = 0 ] || ! grep -q "has no hydra" "$scratch/bare.log"; then
    fail "a machine without Hydra was not told so"
fi
tail -n 1 "$scratch/bare.log"
cp -r .gpu "$scratch/checkout/"

for call in "${calls[@]}"; do
    echo "== call $call, killed in its second stage"
    out=$scratch/killed-$call log=$scratch/killed-$call.log
    set -m # the call becomes a process group that can be killed as a whole
    run "$out" "$call" --seconds 600 > "$log" 2>&1 &
    leader=$!
    set +m
    until [ "$(grep -c '^== .*, at most' "$log" 2> /dev/null || true)" -ge 2 ]; do
        kill -0 "$leader" 2> /dev/null || { cat "$log"; fail "call $call ended early"; }
        sleep 0.5
    done
    kill -KILL -- "-$leader"
    pkill -KILL -f "$scratch" || true # the stage, which has a session of its own
    wait "$leader" 2> /dev/null || true
    tar -xzOf "$out/results.tar.gz" results/summary.txt | tee "$scratch/summary"
    grep -q ": passed" "$scratch/summary" || fail "the stage before the killed one was lost"
    grep -q "missing: " "$scratch/summary" || fail "the killed stage is not reported as missing"

    echo "== call $call"
    run "$scratch/out-$call" "$call" --seconds 1200 || fail "call $call failed"
    find "$scratch/out-$call" -type f -printf '%P %s bytes\n'
    [ "$(find "$scratch/out-$call" -type f | wc -l)" -le 8 ] || fail "more than 8 files would come back"
done
echo "rehearse.sh: passed with torch $TORCH, commit $(cat .gpu/commit)"
