#!/usr/bin/env bash
# The package as its users get it (make test-wheel):
#
#   PYTHON=.venv/bin/python VERSIONS=.versions scripts/test_wheel.sh [ARGUMENTS OF pip install]
#
# Builds sdist and wheel from the tracked files, checks that every file is in the wheel and that PyPI
# can show the description, installs the wheel into a fresh environment below VERSIONS (7 GB, with the
# CUDA libraries of torch), and works with it in an empty directory: no checkout is on the path.
# CPU wheels of torch: --extra-index-url https://download.pytorch.org/whl/cpu
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=$(realpath -s "${PYTHON:-.venv/bin/python}") # has build and twine
VERSIONS=${VERSIONS:-.versions}
mkdir -p "$VERSIONS"
directory=$(realpath "$VERSIONS")/wheel
rm -rf "$directory"
mkdir -p "$directory/source" "$directory/empty"
unset PYTHONPATH
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=PASSIVE

# what git does not track cannot stand in for a file that the package forgets
git ls-files -z | tar --create --null --files-from - | tar --extract --directory "$directory/source"
tracked=$(git ls-files sparsepretrain hydra_plugins configs | sed 's,^configs/,sparsepretrain/configs/,' | sort)
cd "$directory"
echo "== build"
"$PYTHON" -m build --outdir dist source >build.log 2>&1 || { tail build.log; exit 1; }
"$PYTHON" -m twine check --strict dist/*
missing=$(comm -23 <(echo "$tracked") <("$PYTHON" -c 'import sys, zipfile
print(*zipfile.ZipFile(sys.argv[1]).namelist(), sep="\n")' dist/*.whl | sort))
if [ -n "$missing" ]; then
    printf 'test-wheel: the wheel lacks these files:\n%s\n' "$missing" >&2
    exit 1
fi

echo "== install"
"$PYTHON" -m venv environment
environment/bin/python -m pip install --quiet dist/*.whl "$@"
environment/bin/python -m pip check
cd empty
export PATH=$directory/environment/bin:$PATH

run() {
    echo "== $*"
    "$@" >"$directory/output" 2>&1 || { cat "$directory/output"; exit 1; }
    tail -n 2 "$directory/output"
}

run python -c "import sparsepretrain, torch
assert sparsepretrain.__file__.startswith('$directory/environment/'), sparsepretrain.__file__
print('sparsepretrain', sparsepretrain.__version__, 'torch', torch.__version__)"
run sparsepretrain doctor
run sparsepretrain methods
run sparsepretrain configs
run sparsepretrain train steps=20 eval.every=20 eval.batches=2
run sparsepretrain eval runs/gpt2_nano/*
run sparsepretrain report runs/gpt2_nano/*
run sparsepretrain export runs/gpt2_nano/* --out exported
run sparsepretrain audit exported --require 2:4
run sparsepretrain train -m sparsity=dense,srste seed=0,1 experiment=claims_regression steps=20
# a table with published numbers; its rows are shorter than its claims need
run sparsepretrain reproduce sste_table1 --seeds 1 steps=10 schedule.warmup=2
run sparsepretrain report sste_table1 --seeds 1 steps=10 schedule.warmup=2
test -s reports/sste_table1/sste_table1.html
echo "== the wheel works outside the checkout"
