#!/usr/bin/env bash
# Everything that only a GPU can show, in pieces of at most ten minutes each:
#
#   scripts/gpu_check.sh [--fake] [PIECE …]
#
#   tests              the kernels against their references, bit for bit; layers compiled, in bf16
#   triton             the tests of the Triton kernels, not interpreted
#   doctor             versions, and the start-up test of sparse products
#   kernels            kernels against the reference, other formulations and a device copy
#   linear             one linear layer of every method against nn.Linear
#   linear-auto        the same with sparse products where they are faster
#   linear-fp8         the same in fp8; linear-fp8-auto likewise
#   block              an FFN and a block of S-STE and T-SR-STE, training and inference
#   block-auto         the same with sparse products where they are faster
#   products           2:4 products against dense ones, fp16, bf16 and fp8
#   train-METHOD       50 steps of GPT-2 124M beside dense; METHODS="srste sste tsrste"
#   train-METHOD-auto  the same with sparse products where they are faster
#   hours              GPU hours of whole recipes: only if it is named, with the package installed
#
# Without a PIECE all of them run. A piece that is finished is skipped when the command is given
# again; delete PIECE.log to repeat it. A piece that fails does not keep the others from running.
# JSON, plots, logs and summary.md go to ${OUT:-benchmarks/results}/NAME-OF-THE-GPU.
#
# Runs from a bare checkout: needs bash, Python ≥ 3.11 with torch, triton, numpy, pytest, rich and
# pyyaml; nothing is installed or downloaded.
#
#   PYTHON=python3.12 OUT=/tmp/results scripts/gpu_check.sh kernels linear
#   QUICK=1 …   fewer rounds and shapes: does it run?
#   --fake      rehearse on the CPU: tiny sizes, kernels interpreted, no figure means anything;
#               results go to a new directory unless OUT names one
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
METHODS=${METHODS:-srste sste tsrste}
LIMIT=590 # seconds of a piece
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE

fake=0 wanted=()
for word in "$@"; do
    case $word in
        --fake) fake=1 ;;
        *) wanted+=("$word") ;;
    esac
done

known=(tests triton doctor kernels linear linear-auto linear-fp8 linear-fp8-auto block block-auto products)
for method in $METHODS; do known+=("train-$method" "train-$method-auto"); done
for word in "${wanted[@]}"; do
    if [[ " ${known[*]} hours " != *" $word "* ]]; then
        echo "gpu_check: unknown piece '$word'; known are: ${known[*]} hours" >&2
        exit 2
    fi
done

if [ "$fake" = 1 ]; then
    export CUDA_VISIBLE_DEVICES=
    OUT=${OUT:-$(mktemp -d)} name=fake quick=true
elif name=$("$PYTHON" -c "import torch; print(torch.cuda.get_device_name())" 2> /dev/null); then
    OUT=${OUT:-benchmarks/results} quick=false
    if [ "${QUICK:-0}" = 1 ]; then quick=true; fi
else
    echo "gpu_check: no CUDA GPU here; --fake rehearses on the CPU" >&2
    exit 1
fi
name=$(tr '[:upper:]' '[:lower:]' <<< "$name" | tr -cs '[:alnum:]\n' '-')
results=$OUT/$name
mkdir -p "$results"
failed=()

run() { # piece, command: its output is kept as PIECE.log once it is finished
    local piece=$1 start=$SECONDS code=0 log=$results/$1.log
    shift
    rm -f "$results/$piece.json"
    echo "== $piece: $*"
    timeout "$LIMIT" "$@" 2>&1 | tee "$log.part" || code=${PIPESTATUS[0]}
    if [ "$code" = 1 ] && [ -e "$results/$piece.json" ]; then
        echo "== $piece: a goal was missed" | tee -a "$log.part"
    elif [ "$code" != 0 ]; then
        echo "== $piece: FAILED with exit code $code after $((SECONDS - start)) s"
        failed+=("$piece")
        return
    fi
    mv "$log.part" "$log"
    echo "== $piece: done in $((SECONDS - start)) s"
}

bench() { # piece, words of `sparsepretrain bench`
    local piece=$1
    shift
    run "$piece" "$PYTHON" -m sparsepretrain bench "$@" "quick=$quick" "out=$results/$piece.json"
}

if [ ${#wanted[@]} = 0 ]; then wanted=("${known[@]}"); fi
for piece in "${wanted[@]}"; do
    if [ -e "$results/$piece.log" ]; then
        echo "== $piece: was finished before"
        continue
    fi
    auto=()
    if [[ $piece == *-auto ]]; then auto=(backend=auto); fi
    if [[ $piece == *-fp8* ]]; then auto+=(fp8=true); fi
    case $piece in
        tests | triton)
            words=(-m pytest -q -rs -p no:cacheprovider tests/gpu) settings=(SPARSEPRETRAIN_TEST_DEVICE=cuda)
            if [ "$piece" = triton ]; then words[-1]=tests/kernels_triton; fi
            if [ "$fake" = 1 ]; then
                settings=(SPARSEPRETRAIN_TEST_DEVICE=cpu TRITON_INTERPRET=1)
                if [ "$piece" = triton ]; then words[-1]=tests/kernels_triton/test_triton_noise.py; fi
            fi
            run "$piece" env "${settings[@]}" "$PYTHON" "${words[@]}"
            ;;
        doctor) run "$piece" "$PYTHON" -m sparsepretrain doctor ;;
        kernels) bench "$piece" suite=kernels ;;
        linear* | block*) bench "$piece" "suite=${piece%%-*}" "${auto[@]}" ;;
        products | hours) bench "$piece" "suite=$piece" ;;
        train-*)
            method=${piece#train-}
            bench "$piece" suite=train "methods=${method%-auto}" "${auto[@]}"
            ;;
    esac
done
"$PYTHON" -m sparsepretrain.bench.summary "$results"
if [ ${#failed[@]} -gt 0 ]; then
    echo "gpu_check: failed: ${failed[*]}; results in $results" >&2
    exit 1
fi
echo "gpu_check: nothing failed; results in $results"
