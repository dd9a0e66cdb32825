# `make demo` and `make test` set up what is missing. They need Python 3.11, git and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: help setup setup-airflow lint format test test-full chaos demo ui compose-env clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

setup:  ## both environments and the models; keeps what is there
	@$(PYTHON) -m scripts.set_up

setup-airflow:
	@$(PYTHON) -m scripts.set_up airflow

lint: setup-airflow  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup-airflow  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What starts no real vLLM and no whole Airflow waits more than it works: several at once.
test: setup  ## all tests but the long matrices
	@code=0; \
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "not vllm and not stack and not full and not chaos" || code=1; \
	$(BIN)/python -m pytest -m "(vllm or stack) and not full and not chaos" || code=1; \
	exit $$code

test-full: setup  ## all tests, the long matrices too
	$(BIN)/python -m pytest -m "not chaos"

chaos: setup  ## parts are killed at random while batches run
	$(BIN)/python -m pytest tests/chaos -m ''

demo: setup  ## two example DAGs through a real Airflow; MODEL=... for another model
	@$(BIN)/python -m scripts.demo

ui: setup  ## Airflow's UI on localhost with the example DAGs, until Ctrl-C
	@$(BIN)/python -m scripts.ui

compose-env: setup-airflow  ## .env with fresh secrets for docker-compose.yaml
	@$(BIN)/python -m scripts.compose_env

clean:  ## remove everything that make made
	rm -rf .venv .venv-vllm .cache .demo dist build .mypy_cache .ruff_cache .pytest_cache
