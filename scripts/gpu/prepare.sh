#!/usr/bin/env bash
# Make .gpu/, which travels to a GPU machine that has torch but no network, no git and no Hydra:
#
#   scripts/gpu/prepare.sh [PACKAGE==VERSION …]
#
# wheels of Hydra and of the packages that are named, a tokenizer, and the commit (3 MB in all).
# Run it in a committed checkout, where packages can be downloaded. PYTHON: .venv/bin/python.
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-.venv/bin/python}
if [ -n "$(git status --porcelain --untracked-files=no)" ]; then
    echo "prepare.sh: commit your changes first, so that the results name a commit" >&2
    exit 1
fi
mkdir -p .gpu/wheels
# antlr4-python3-runtime 4.9.3 has no wheel on PyPI: `pip wheel` builds one, `pip download` fails.
# omegaconf 2.4 does not go with hydra-core 1.3.
"$PYTHON" -m pip wheel --quiet --no-deps --wheel-dir .gpu/wheels \
    antlr4-python3-runtime==4.9.3 hydra-core==1.3.8 omegaconf==2.3.1 "$@"
git describe --always --abbrev=12 > .gpu/commit
if [ ! -e .gpu/tokenizer.json ]; then # 50,257 tokens, trained on the standard library: 15 s
    cache=$(mktemp -d)
    trap 'rm -rf "$cache"' EXIT
    SPARSEPRETRAIN_CACHE_DIR=$cache "$PYTHON" -m sparsepretrain prepare model=gpt2_124m \
        data=python_source data.tokenizer=gpt2_size_bpe tracker=jsonl > "$cache/log"
    cp "$cache"/python_source-*/tokenizer.json .gpu/
fi
bytes=$(git ls-files -z | du -cb --files0-from=- | tail -n 1 | cut -f 1)
own=$(du -sb .gpu | cut -f 1)
echo "prepare.sh: commit $(cat .gpu/commit); checkout $((bytes >> 20)) MiB, .gpu $((own >> 20)) MiB"
