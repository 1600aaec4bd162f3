# Every target sets up its own virtual environment in .venv first: see scripts/setup_env.py.
# Only Python 3.10 or newer, make and git need to be there. Another Python: make PYTHON=python3.12 test

ifeq ($(OS),Windows_NT)
PYTHON ?= python
BIN := .venv/Scripts
else
PYTHON ?= python3
BIN := .venv/bin
endif

# One thread a worker: the suite runs on every core already, and more threads only fight for them.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
WORKERS := --numprocesses=auto --maxprocesses=8 --dist=worksteal

.PHONY: docs package screens demo test suite slow fuzz matrix bench lint format setup clean help
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' Makefile

demo: setup ## a real FP16 training run that fails, watched step by step
	@$(BIN)/ampdbg scan configs/linear_attention.yaml; code=$$?; \
	test $$code -le 1 || exit $$code # 1: something was found, which is the point of the demo

test: setup ## lint, format and types beside the test suite with its layers: five to seven minutes on two cores
	@begun=$$(date +%s); $(MAKE) --no-print-directory --jobs=2 lint suite; code=$$?; took=$$(($$(date +%s) - begun)); \
	printf 'make test: %d:%02d\n' $$((took / 60)) $$((took % 60)); exit $$code

suite: setup
	@$(PYTEST) $(WORKERS)

slow: setup ## the tests that take long, or stand beside a quicker one of their kind
	@$(PYTEST) $(WORKERS) -m slow

fuzz: setup ## 20,000 configs, 5,000 records, 500 workloads and 300 signals that are meant to break it, 10,000 models: hours
	@$(PYTEST) tests/fuzz --hypothesis-profile=fuzz --hypothesis-show-statistics --numprocesses=4 --dist=load

matrix: setup ## the suite on every Python found, each with the oldest torch, a middle and the newest (gigabytes)
	@$(BIN)/python -m pip install --quiet --editable ".[matrix]" && $(BIN)/nox

bench: setup ## the measured claims: speed of the emulation, of watching, of ranges and of the search
	@$(BIN)/python -m benchmarks.startup
	@$(BIN)/python -m benchmarks.steps
	@$(BIN)/python -m benchmarks.ranges
	@$(BIN)/python -m benchmarks.search
	@$(BIN)/python -m benchmarks.bisect

package: setup ## wheel and sdist into dist/, checked as the package index checks them
	@rm -rf dist && $(BIN)/python -m build --no-isolation && $(BIN)/python -m twine check --strict dist/*

docs: setup ## the documentation, from docs/ and from the code, into build/docs
	@$(BIN)/python -m pip install --quiet --editable ".[docs]" && $(BIN)/python -m scripts.docs_pages && NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

screens: setup ## the screens of README and documentation, by running the examples: minutes
	@$(BIN)/python scripts/screens.py
	@$(BIN)/python scripts/page_picture.py
	@$(BIN)/python -m scripts.docs_pages # the screens stand in pages of docs/ too

lint: setup ## only lint, format and types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: setup ## apply the formatter and the safe fixes
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

setup: ## only make or update .venv
	@$(PYTHON) scripts/setup_env.py

clean: ## remove .venv and the tools' caches
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
