#!/usr/bin/env bash
# Property tests with cases that no run had before (make test-explore):
#
#   PYTHON=.venv/bin/python MINUTES=20 scripts/test_explore.sh [PATH …]
#
# Rounds of all property tests, each with a printed seed, until MINUTES are over or a test fails.
# SEED=N repeats the round of that seed.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
MINUTES=${MINUTES:-20}
export OMP_NUM_THREADS=1 SPARSEPRETRAIN_TEST_PROFILE=explore
paths=("$@")
if [ ${#paths[@]} = 0 ]; then paths=(tests); fi

round=0
while [ "$round" = 0 ] || { [ -z "${SEED:-}" ] && [ "$SECONDS" -lt $((MINUTES * 60)) ]; }; do
    round=$((round + 1))
    seed=${SEED:-$((RANDOM * 32768 + RANDOM))}
    echo "== round $round, seed $seed, after $SECONDS s"
    # the calls of a property per round: more of them find more in one start of the interpreter
    SPARSEPRETRAIN_TEST_CALLS=${SPARSEPRETRAIN_TEST_CALLS:-20} \
        "$PYTHON" -m pytest -n 2 -m "not slow and not dist and not fault" --hypothesis-seed="$seed" \
        "${paths[@]}" || { echo "test_explore.sh: SEED=$seed scripts/test_explore.sh repeats it" >&2; exit 1; }
done
echo "test_explore.sh: $round rounds in $SECONDS s, nothing failed"
