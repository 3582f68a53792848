# make test   everything CI checks: style, types, tests; creates the environment when there is none
# make clean  removes the environment and caches

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: test lint types pytest clean

test: lint types pytest

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

# Each worker keeps to one thread: the models in the tests are tiny, and threads would only fight for cores.
pytest: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto --durations=10

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,plots]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
