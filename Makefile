# Everything sets itself up: `make train` and `make test` work on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: train check test test-all faults fuzz planted compiled memory soak lint bytecode bench bench-short bench-overhead bench-links quality clean

train: $(STAMP)
	$(BIN)/penstock train $(ARGS)

check: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal --few-examples -m smoke

test: lint
	$(BIN)/python -m pytest -n 4 --dist worksteal --some-cases -m "not long"

test-all: lint
	$(BIN)/python -m pytest -n 4 --dist worksteal

faults: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m campaigns.faults $(ARGS)

fuzz: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m campaigns.fuzz $(ARGS)

planted: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m campaigns.planted_defects $(ARGS)

compiled: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m campaigns.compiled $(ARGS)

memory: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m campaigns.memory $(ARGS)

soak: $(STAMP)
	$(BIN)/python -m tools.soak $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Else every process that tests start, and all workers of pytest at once, would compile the same files.
bytecode: $(STAMP)
	$(BIN)/python -m compileall -q src
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --collect-only > /dev/null

bench: $(STAMP)
	$(BIN)/python -m benchmarks.throughput $(ARGS)

bench-short: $(STAMP)
	$(BIN)/python -m benchmarks.throughput --short $(ARGS)

bench-overhead: $(STAMP)
	$(BIN)/python -m benchmarks.overhead $(ARGS)

bench-links: $(STAMP)
	$(BIN)/python -m benchmarks.links $(ARGS)

quality: $(STAMP)
	$(BIN)/python -m benchmarks.quality $(ARGS)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # pip would, but on one core; it, too, passes over files of newer Pythons
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
