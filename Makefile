# Everything a fresh machine needs: `make train` and `make test` create .venv, install the project with its extras
# and do their job. A second call finds the stamp file and starts at once. `make help` lists the targets.

PYTHON ?= python3
VENV   ?= .venv
# Number of processes and further arguments of the training run, e.g. make train ARGS="layout=dp8_zero2"
N      ?= 8
ARGS   ?=
# Which torch to install, and further flags for pip, e.g. make test PIP_FLAGS="--find-links wheels/"
TORCH  ?=
PIP_FLAGS ?=
TESTS  ?= tests

BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip
TORCH_VERSION := 2.13.0

# One process a core or more: one thread each, or the threads fight for the cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

# Open MPI refuses to start as root, to use more processes than cores, and probes slow transports first.
MPIRUN_FLAGS ?= $(if $(filter 0,$(shell id -u)),--allow-run-as-root) --map-by slot:OVERSUBSCRIBE --bind-to none \
	--mca pml ob1 --mca btl self,sm,tcp

.DEFAULT_GOAL := help
.PHONY: help install train sweep test lint bench models clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## create .venv and install the project with its extras

$(STAMP): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Parallax needs Python 3.11 or newer, and \
	$(PYTHON) is {v.major}.{v.minor}: make ... PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(MAKE) --no-print-directory torch
	$(PIP) install --quiet $(PIP_FLAGS) -e '.[all,test,dev]'
	@touch $@

# Without a GPU the CPU build is enough (200 MB instead of several GB). pip finds it under its local version when its
# configuration (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL, pip.conf) or PIP_FLAGS names a place that has it.
.PHONY: torch
torch:
	@if [ -n '$(TORCH)' ]; then set -x; $(PIP) install --quiet $(PIP_FLAGS) '$(TORCH)'; \
	elif nvidia-smi >/dev/null 2>&1; then echo 'GPU found: installing torch as pip finds it'; \
		$(PIP) install --quiet $(PIP_FLAGS) 'torch==$(TORCH_VERSION)'; \
	else echo 'no GPU found: installing torch for the CPU'; \
		$(PIP) install --quiet $(PIP_FLAGS) 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null \
		|| { echo 'no +cpu build in reach of pip: taking torch as pip finds it (on Linux that build can hold CUDA, several GB;'; \
			echo 'name a place with CPU builds in PIP_FLAGS to avoid that)'; \
			$(PIP) install --quiet $(PIP_FLAGS) 'torch==$(TORCH_VERSION)'; }; \
	fi

train: $(STAMP) ## train a small Llama on N=8 processes under mpirun
	$(BIN)/mpirun $(MPIRUN_FLAGS) -n $(N) $(BIN)/python examples/train_llama.py $(ARGS)

sweep: $(STAMP) ## time every layout of 8 processes, e.g. make sweep ARGS="model=llama_tiny,gpt2_tiny"
	$(BIN)/python examples/train_llama.py -m +sweep=layouts_8 $(ARGS)

test: $(STAMP) ## run the test suite
	$(BIN)/python -m pytest --durations=10 $(TESTS)

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP) ## step times beside plain torch, Lightning and DeepSpeed
	$(BIN)/python benchmarks/step_time.py $(ARGS)

models: $(STAMP) ## cut every causal-LM architecture of transformers; writes docs/models.md
	$(BIN)/python -m tests.sweep

clean: ## remove .venv, caches and outputs
	rm -rf $(VENV) build dist outputs .mypy_cache .ruff_cache .pytest_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
