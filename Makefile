# `make demo` and `make test` need only Python 3.11 or newer, pip and make. They install the dependencies into .venv in
# this folder, or use the .venv that exists, with the package index that pip is configured for.

PYTHON ?= $(shell for python in python3.11 python3; do $$python -c $(NEW_ENOUGH) 2>/dev/null && echo $$python && break; done)
NEW_ENOUGH := 'import sys; sys.exit(sys.version_info < (3, 11))'
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-slow test-faults test-viewers test-compat viewers docs dist bench clean

help:
	@echo 'make demo       train PPO on CartPole-v1 and print the path of the trajectories'
	@echo 'make test       lint, format and type check, and all tests except the slow ones'
	@echo 'make test-slow  the slow tests; TESTS=tests/agents selects a folder'
	@echo 'make test-faults  all tests of kills, signals, full disks, damaged files and leaks; about 25 minutes on two cores'
	@echo 'make test-viewers  H5Web in Chromium, silx, h5dump and PyTables on files of runs, and the site; keeps screenshots'
	@echo 'make test-compat  environments of other packages, each in a virtual environment; PACKAGES="minigrid brax" selects'
	@echo 'make docs       build the documentation site in build/docs'
	@echo 'make dist       build the sdist and the wheel in dist'
	@echo 'make bench      the benchmarks, with comparisons to other libraries'
	@echo 'make clean      remove the environment, builds and caches, but not runs/'

demo: .venv/installed
	$(BIN)/rein train cartpole

test: .venv/installed-test .venv/installed-lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/mypy --strict --follow-imports=silent tests/typed
	$(PYTEST)

test-slow: .venv/installed-test
	$(PYTEST) -m slow $(TESTS)

test-faults: .venv/installed-test
	REIN_FAULTS=1 $(PYTEST) --maxprocesses 2 --timeout 3600 -rP -m '' tests/faults

test-viewers: viewers docs .venv/installed-test .venv/installed-viewers build/viewers/bundle.js
	REIN_VIEWERS=build/viewers $(BIN)/python -m pytest --timeout 600 tests/viewers
	@echo 'screenshots: build/viewers/screenshots; python docs/screenshots.py makes those of docs/reference/file_format.md'

test-compat: .venv/installed
	$(BIN)/python tests/compat/run.py $(PACKAGES)

viewers:
	@for program in $(or $(CHROMIUM),chromium) npm h5dump h5ls; do command -v $$program >/dev/null || { \
		echo "make test-viewers needs $$program; on Debian: apt install chromium hdf5-tools nodejs npm" >&2; exit 1; }; done

# package.json pins all versions. A lock file would contain the address of the npm registry.
build/viewers/bundle.js: $(wildcard tests/viewers/h5web/*)
	mkdir -p build/viewers
	cp $^ build/viewers
	cd build/viewers && npm install --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel error && npm run build

docs: .venv/installed-docs
	rm -rf build/docs
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx --fail-on-warning --keep-going -j auto -q docs build/docs
	@echo 'open build/docs/index.html'

dist: .venv/installed-test
	rm -rf dist
	$(BIN)/python -m hatchling build --target sdist --target wheel

bench: .venv/installed-bench
	set -e; for benchmark in tests/benchmarks/*.py; do OMP_NUM_THREADS=1 $(BIN)/python $$benchmark; done

clean:
	rm -rf .venv build dist .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(or $(PYTHON),false) -c $(NEW_ENOUGH) || { echo 'rein needs Python 3.11 or newer; give its path: make PYTHON=/path/to/python' >&2; exit 1; }
	$(PYTHON) -m venv .venv

# The pip of Python 3.11 does not support dependency groups and build constraints.
.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) pip
	$(INSTALL) --build-constraint constraints.txt --editable .
	@touch $@

.venv/installed-%: .venv/installed
	$(INSTALL) --group $*
	@touch $@
