# Every target sets up what it needs: a virtual environment in .venv, from PyPI.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The packages that we are measured against have an environment of their own.
BENCH := .bench/venv
BENCH_READY := $(BENCH)/.ready
JOBS ?= 2

.PHONY: demo test test-portable lint format types docs package results bench bench-env clean

demo: $(READY)
	$(BIN)/zeromean demo

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# The numerical tests with the kernels and the number of threads of other machines.
test-portable: $(READY)
	$(BIN)/python tools/test_portable.py --jobs $(JOBS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/basedpyright

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/mkdocs build --strict

# Wheel and sdist in dist/, checked, and used in a fresh virtual environment.
package: $(READY)
	$(BIN)/python tools/package.py

# The tables of README and documentation and a page with figures, from the committed records.
results: $(READY)
	$(BIN)/zeromean report --markdown docs/results.md
	$(BIN)/python benchmarks/publish.py

bench: bench-env
	OMP_NUM_THREADS=1 $(BENCH)/bin/python benchmarks/run.py

# torch goes in first and pinned: left to a resolver, it would bring gigabytes of CUDA packages.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "zeromean needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# For the other benchmarks too, which the documentation names.
bench-env: $(BENCH_READY)

# Two steps: some peers ask for torchvision, which would replace torch by a CUDA build.
$(BENCH_READY): benchmarks/requirements.txt benchmarks/requirements-peers.txt
	test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet --requirement benchmarks/requirements.txt
	$(BENCH)/bin/python -m pip install --quiet --no-deps --requirement benchmarks/requirements-peers.txt
	touch $@

clean:
	rm -rf $(VENV) .bench build dist site .pytest_cache .ruff_cache
