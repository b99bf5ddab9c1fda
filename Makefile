# Two commands do everything on a fresh machine with Python ≥ 3.11, make and pip:
#   make train   install the package and train the default run
#   make test    the same environment with the development tools; lint, types, imports, tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Both commands install the checkout in editable mode: a copy in site-packages would shadow it.
EDITABLE := $(VENV)/.editable
DEV := $(VENV)/.editable-dev
INSTALLED := $(if $(wildcard $(DEV)),$(DEV),$(EDITABLE))
VERSIONS ?= .versions
MINUTES ?= 20
# Two busy OpenMP threads per test process on a small machine are slower than one. The order of sets
# is the same in every run, as drawn cases are (tests/conftest.py).
TEST := OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(BIN)/python -m pytest

.PHONY: train test lint test-fast test-explore test-triton test-kernels-offline test-without-gpu test-versions test-hosts \
	test-wheel test-fault test-dist test-slow test-slurm rehearse-gpu reliability determinism golden bench docs site \
	examples clean

train: $(INSTALLED)
	$(BIN)/sparsepretrain train $(ARGS)

test: lint test-fast test-triton test-kernels-offline test-without-gpu

lint: $(DEV)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/codespell sparsepretrain hydra_plugins tests configs docs examples scripts benchmarks *.md
	$(BIN)/mypy --no-error-summary
	@out=$$($(BIN)/lint-imports 2>&1) || { echo "$$out"; exit 1; }

test-fast: $(DEV)
	$(TEST) -n 2 -m "not fault and not slow and not dist and not hosts and not slurm"

# the Triton kernels in its interpreter, which cannot share a process with other uses of Triton:
# their own tests, then the golden vectors and nasty blocks of the references (without the test that
# averages 1,000 draws: a minute there)
test-triton: $(DEV)
	$(TEST) -n 2 tests/suites/kernels_triton tests/suites/fake_cuda_tensors
	TRITON_INTERPRET=1 SPARSEPRETRAIN_TEST_BACKEND=triton SPARSEPRETRAIN_TEST_BLOCKS=1024 \
		SPARSEPRETRAIN_TEST_CALLS=1 $(TEST) -n 2 -W ignore -k "(golden or block_properties) and not golden_losses" \
		--deselect tests/sparsity/methods/test_golden_layers.py::test_the_mean_over_many_steps_is_the_dense_gradient \
		tests/kernels tests/sparsity

# the same, compiled for sm_80, sm_90 and sm_100, none with spilled registers; no GPU is needed
test-kernels-offline: $(DEV)
	$(TEST) -n 2 tests/suites/compile_only

# launches of every kernel under a driver that runs nothing, in the same kind of process
test-without-gpu: $(DEV)
	$(TEST) -n 2 -m "not slow" tests/suites/stub_driver

# the oldest torch that is supported, and others, in environments of their own (13 GB in VERSIONS)
test-versions: $(DEV)
	PYTHON=$(BIN)/python VERSIONS=$(VERSIONS) scripts/test_versions.sh

# the wheel in a fresh environment outside the checkout (7 GB in VERSIONS); PIP: further arguments of pip install
test-wheel: $(DEV)
	PYTHON=$(BIN)/python VERSIONS=$(VERSIONS) scripts/test_wheel.sh $(PIP)

# sparse models in the loops of other libraries, in an environment of their own (8 GB in VERSIONS)
test-hosts: $(DEV)
	PYTHON=$(BIN)/python VERSIONS=$(VERSIONS) scripts/test_hosts.sh

# the program of docs/gpu.md as a bare GPU machine would run it (5 GB in VERSIONS)
rehearse-gpu: $(DEV)
	VERSIONS=$(VERSIONS) scripts/gpu/rehearse.sh

# property tests with new cases for MINUTES; prints the seed of every round
test-explore: $(DEV)
	PYTHON=$(BIN)/python MINUTES=$(MINUTES) scripts/test_explore.sh

test-fault: $(DEV)
	$(TEST) -m fault

# several processes on the CPU (gloo), and what happens when one of them fails
test-dist: $(DEV)
	$(TEST) -m dist

# a real Slurm on this machine, in namespaces of its own (root; Debian's slurm-wlm and munge)
test-slurm: $(DEV)
	PYTHON=$(BIN)/python scripts/test_slurm.sh

test-slow: $(DEV)
	$(TEST) -m slow

# all of docs/reliability.md, or `make reliability ROWS="R1 R3"`; about an hour on two cores
reliability: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/reliability.py $(ROWS)
	$(BIN)/python scripts/generate_docs.py

# all of docs/determinism.md, or `make determinism ONLY="'sste *' mutants"`; 46 minutes on two cores;
# a second start does what is left
determinism: $(DEV)
	PYTHONPATH=.:tests:benchmarks $(BIN)/python scripts/determinism.py $(ONLY)
	$(BIN)/python scripts/generate_docs.py

# the 50-step losses that a change of a method's arithmetic changes; prints what did
golden: $(DEV)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m support.golden_losses

bench: $(INSTALLED)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python benchmarks/cpu.py --out benchmarks/results/cpu.json

# the tables of the documentation that come from the code and from the measurements
docs: $(DEV)
	$(BIN)/python scripts/generate_docs.py

# the same pages and the API as a site of static files: build/site/index.html
site: $(DEV)
	$(BIN)/python scripts/make_site.py

# the saved outputs in examples/
examples: $(DEV)
	$(BIN)/python scripts/run_examples.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# Earlier versions installed a copy, in which pip leaves Numba's files: a directory without
# __init__.py that hides the checkout. Without PYTHONWARNINGS, setuptools prints twenty lines about
# editable installations.
define install
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable "$(1)"
	@rm -rf $(VENV)/lib/python*/site-packages/sparsepretrain
	@touch $@
endef

$(EDITABLE): $(BIN)/python pyproject.toml setup.py
	$(call install,.)

$(DEV): $(BIN)/python pyproject.toml setup.py
	$(call install,.[dev])

clean:
	rm -rf $(VENV) .versions build dist *.egg-info
