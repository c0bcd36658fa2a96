# What is there to do: `make help`. Everything is installed into .venv; the first time takes about a minute.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
DEMO_HOME ?=
KEEP ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Few threads: two processes with one thread for every core each are slower than none.
export OMP_NUM_THREADS ?= 2

.PHONY: help demo test test-slow check proto install install-dev clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

demo: install ## A spoken question through every layer (KEEP=1 leaves it running, DEMO_HOME=folder)
	@$(PY) -P -m deployments.demo $(if $(DEMO_HOME),--home "$(DEMO_HOME)") $(if $(KEEP),--keep)

test: install-dev ## All tests but the slow ones
	@$(PY) -m pytest -m "not slow" $(ARGS)

test-slow: install-dev ## Kill matrices, soaks and the like
	@$(PY) -m pytest -m slow $(ARGS)

check: install-dev ## Lint, format, types, import layers, generated code
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	@scripts/proto.sh --check

proto: install-dev ## Make the gRPC code from tasks/protocol/inference.proto
	@scripts/proto.sh

install: ## Install what `smi up` needs
	@scripts/install.sh "$(VENV)" run

install-dev: ## Install what tests and checks need too
	@scripts/install.sh "$(VENV)" dev

clean: ## Remove what was installed and cached
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist *.egg-info
