#!/usr/bin/env bash
# Everything that only a GPU can show, in pieces of at most nine minutes, the most telling first:
#
#   scripts/gpu_check.sh [--fake] [PIECE …]
#
#   smoke              training of gpt2_nano with compile=none and blocks, saved and resumed; 90 s at most
#   doctor             versions, and the start-up test of sparse products
#   trust              that test by type, and the layout of packed matrices
#   linear             one linear layer of S-STE, T-SR-STE and SLoPe against nn.Linear
#   linear-auto        the same with sparse products where they are faster
#   train-METHOD       50 steps of GPT-2 124M beside dense; METHODS="sste tsrste srste"
#   train-METHOD-auto  the same with sparse products where they are faster
#   kernels            kernels against the reference, other formulations and a device copy
#   tests              the kernels against their references, bit for bit; layers compiled, in bf16
#   triton             the tests of the Triton kernels, not interpreted
#   products           2:4 products against dense ones, fp16, bf16 and fp8
#   linear-fp8         linear in fp8; linear-fp8-auto likewise
#   blocks             an FFN and a block of S-STE and T-SR-STE, training and inference
#   blocks-auto        the same with sparse products where they are faster
#   linear-all         linear with every method
#   recipes            GPU hours of whole recipes: only if it is named, with the package installed
#
# Without a PIECE all of them run, in this order. A piece that is finished is skipped when the command
# is given again; delete PIECE.log to repeat it. A piece that fails or is killed does not keep the
# others from running, and what it has measured is kept.
# JSON, logs and summary.md go to ${OUT:-benchmarks/results}/NAME-OF-THE-GPU; after every piece,
# and when this script is stopped, all of it is packed into ${TAR:-$OUT/results.tar.gz}.
#
# Runs from a bare checkout: needs bash, Python ≥ 3.11 with torch, triton, numpy, pytest, rich and
# pyyaml; nothing is installed or downloaded. `smoke` and `recipes` also need what training needs,
# hydra-core among it. With pytest-xdist, tests run in eight processes.
#
#   PYTHON=python3.12 OUT=/tmp/results scripts/gpu_check.sh kernels linear
#   WITHIN=560 …  end after so many seconds: what does not fit is left for the next call
#   QUICK=1 …     fewer rounds and shapes: does it run?
#   --fake        rehearse on the CPU: tiny sizes, kernels interpreted, no figure means anything;
#                 results go to a new directory unless OUT names one
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
METHODS=${METHODS:-sste tsrste srste}
LIMIT=${LIMIT:-540} # seconds of a piece
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE

fake=0 wanted=()
for word in "$@"; do
    case $word in
        --fake) fake=1 ;;
        *) wanted+=("$word") ;;
    esac
done

known=(smoke doctor trust linear linear-auto)
for method in $METHODS; do known+=("train-$method" "train-$method-auto"); done
known+=(kernels tests triton products linear-fp8 linear-fp8-auto blocks blocks-auto linear-all)
for word in "${wanted[@]}"; do
    if [[ " ${known[*]} recipes " != *" $word "* ]]; then
        echo "gpu_check: unknown piece '$word'; known are: ${known[*]} recipes" >&2
        exit 2
    fi
done

if [ "$fake" = 1 ]; then
    export CUDA_VISIBLE_DEVICES=
    OUT=${OUT:-$(mktemp -d)} name=fake quick=--quick
elif name=$("$PYTHON" -c "import torch; print(torch.cuda.get_device_name())"); then
    OUT=${OUT:-benchmarks/results} quick=
    if [ "${QUICK:-0}" = 1 ]; then quick=--quick; fi
else
    echo "gpu_check: no CUDA GPU here, for the reason above; --fake rehearses on the CPU" >&2
    exit 1
fi
name=$(tr '[:upper:]' '[:lower:]' <<< "$name" | tr -cs '[:alnum:]\n' '-')
results=$OUT/$name
TAR=${TAR:-$OUT/results.tar.gz}
mkdir -p "$results" "$(dirname "$TAR")"
failed=() child=

pack() { # a summary and one file with everything, which is there as a whole or not at all
    "$PYTHON" benchmarks/summary.py "$results" > /dev/null || true
    tar -C "$OUT" -czf "$TAR.part" "$name" && mv "$TAR.part" "$TAR"
}

stopped() {
    trap '' TERM INT HUP
    if [ -n "$child" ]; then kill "$child" 2> /dev/null || true; wait; fi
    exit 143
}
trap pack EXIT
trap stopped TERM INT HUP

run() { # piece, seconds, command: its output is kept as PIECE.log once it is finished
    local piece=$1 limit=$2 start=$SECONDS code=0 log=$results/$1.log
    shift 2
    rm -f "$results/$piece.json"
    echo "== $piece: $*"
    : > "$log.part"
    timeout --kill-after=5 "$limit" "$@" > "$log.part" 2>&1 &
    child=$!
    tail -n +1 -s 0.2 -f --pid="$child" "$log.part" &
    wait "$child" || code=$?
    child=
    wait
    if [ "$code" = 1 ] && [ -e "$results/$piece.json" ]; then
        echo "== $piece: a goal was missed" | tee -a "$log.part"
    elif [ "$code" != 0 ]; then
        echo "== $piece: FAILED with exit code $code after $((SECONDS - start)) s" | tee -a "$log.part"
        failed+=("$piece")
        return
    fi
    mv "$log.part" "$log"
    echo "== $piece: done in $((SECONDS - start)) s"
}

if [ ${#wanted[@]} = 0 ]; then wanted=("${known[@]}"); fi
for piece in "${wanted[@]}"; do
    if [ -e "$results/$piece.log" ]; then
        echo "== $piece: was finished before"
        continue
    fi
    # spare: seconds that the case that is begun last may take
    limit=$LIMIT spare=$((LIMIT / 9))
    if [ "$piece" = smoke ] && [ "$fake" = 0 ]; then limit=90 spare=30; fi # a CPU compiles slowly
    if [ -n "${WITHIN:-}" ] && [ $((WITHIN - SECONDS)) -lt "$limit" ]; then
        limit=$((WITHIN - SECONDS))
        if [ "$limit" -le "$spare" ]; then
            echo "== $piece: not begun, too little of the $WITHIN s is left"
            failed+=("$piece")
            continue
        fi
    fi
    script=${piece%%-*}
    words=(${quick:+"$quick"} --budget "$((limit - spare))" --out "$results/$piece.json")
    if [[ $piece == *-fp8* ]]; then words=(--fp8 "${words[@]}"); fi
    if [[ $piece == *-auto ]]; then words=(--backend auto "${words[@]}"); fi
    command=()
    case $piece in
        tests | triton)
            command=(-m pytest -q -rs -p no:cacheprovider) settings=(SPARSEPRETRAIN_TEST_DEVICE=cuda)
            if "$PYTHON" -c "import xdist" 2> /dev/null; then command+=(-n "$((fake ? 2 : 8))"); fi
            where=tests/gpu
            if [ "$piece" = triton ]; then where=tests/kernels_triton; fi
            if [ "$fake" = 1 ]; then
                settings=(SPARSEPRETRAIN_TEST_DEVICE=cpu TRITON_INTERPRET=1)
                if [ "$piece" = triton ]; then where=tests/kernels_triton/test_triton_noise.py; fi
            fi
            command=(env "${settings[@]}" "$PYTHON" "${command[@]}" "$where")
            ;;
        doctor) command=("$PYTHON" -m sparsepretrain doctor) ;;
        smoke)
            if ! "$PYTHON" -c "import hydra" 2> /dev/null; then
                echo "== smoke: skipped, training needs hydra-core: $PYTHON -m pip install hydra-core"
                continue
            fi
            ;;
        linear-all) ;;
        linear*) words=(--methods sste,tsrste,slope "${words[@]}") ;;
        train-*)
            method=${piece#train-}
            words=(--methods "${method%-auto}" "${words[@]}")
            ;;
    esac
    if [ ${#command[@]} = 0 ]; then command=("$PYTHON" "benchmarks/$script.py" "${words[@]}"); fi
    run "$piece" "$limit" "${command[@]}"
    pack
done
echo "gpu_check: results in $results, packed in $TAR"
if [ ${#failed[@]} -gt 0 ]; then
    echo "gpu_check: failed: ${failed[*]}" >&2
    exit 1
fi
echo "gpu_check: nothing failed"
