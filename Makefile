# The project's commands. Each makes .venv, or reuses it, and installs only what is missing.
#
#   make fit    train the embedded policy in emulated NVFP4    ARGS="trainer.max_steps=3"
#   make test   run the default tests                          ARGS="-k formats -x"
#   make check  all that CI runs: format, lint, types, layers, spelling, tests
#   make format rewrite the sources as ruff likes them
#   make clean  remove .venv, caches and builds; runs and mlflow.db stay

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist worksteal
PINNED := --constraint constraints.txt
SOURCES := lightning_qrl callbacks tests $(wildcard benchmarks experiments)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help fit test check format clean

help:
	@sed -n 's/^#   //p' Makefile

fit: $(VENV)/.installed
	$(BIN)/qrl fit --recipe 4bitter.yaml $(ARGS)

test: $(VENV)/.installed-dev
	$(PYTEST) $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell
	$(PYTEST) $(ARGS)

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find $(SOURCES) -type d -name __pycache__ -prune -exec rm -rf {} +

# torch goes first and alone: a CPU build that the machine's pip offers is then taken, and kept.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, for example: make PYTHON=python3.12 fit"; exit 1; }
	@echo "Installing into $(VENV): a few minutes the first time"
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) install "$$(grep '^torch==' constraints.txt)"
	$(PIP) install $(PINNED) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install $(PINNED) --editable '.[dev]'
	touch $@
