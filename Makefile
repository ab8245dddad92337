# `make demo` and `make test` set up all they need: Python 3.11 or newer, pip and make are enough. The environment is
# .venv in this folder; one that is already there is kept and used. Which package index pip asks is pip's own business.

PYTHON ?= $(shell for python in python3.11 python3; do $$python -c $(NEW_ENOUGH) 2>/dev/null && echo $$python && break; done)
NEW_ENOUGH := 'import sys; sys.exit(sys.version_info < (3, 11))'
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-slow test-faults bench clean

help:
	@echo 'make demo       train PPO on CartPole-v1 and say where the trajectories are'
	@echo 'make test       lint, format and type check, and all tests but the slow ones'
	@echo 'make test-slow  the slow tests'
	@echo 'make test-faults  kills, signals, full disks, damaged files and leaks in full: about 15 minutes on two cores'
	@echo 'make bench      the benchmarks, side by side with the peers'
	@echo 'make clean      remove the environment and what the tools left behind; runs/ is kept'

demo: .venv/installed
	$(BIN)/rein train cartpole

test: .venv/installed-test .venv/installed-lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python
	$(PYTEST)

test-slow: .venv/installed-test
	$(PYTEST) -m slow

test-faults: .venv/installed-test
	REIN_FAULTS=1 $(PYTEST) --maxprocesses 2 --timeout 3600 -rP tests/faults

bench: .venv/installed-bench
	set -e; for benchmark in tests/benchmarks/*.py; do OMP_NUM_THREADS=1 $(BIN)/python $$benchmark; done

clean:
	rm -rf .venv dist .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(or $(PYTHON),false) -c $(NEW_ENOUGH) || { echo 'rein needs Python 3.11 or newer; name one: make PYTHON=/path/to/python' >&2; exit 1; }
	$(PYTHON) -m venv .venv

# The pip that Python 3.11 brings knows no dependency groups and cannot pin what builds a package.
.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) pip
	$(INSTALL) --build-constraint constraints.txt --editable .
	@touch $@

.venv/installed-%: .venv/installed
	$(INSTALL) --group $*
	@touch $@
