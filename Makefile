# make quickstart  from nothing to a trained model, its score, samples and a report, in minutes on two CPU cores
# make test        everything CI checks: style, types, tests; creates the environment when there is none
# make test-fast   style, and the tests that take no more than a second each: for the inner loop of a developer
# make soak        the tests that take minutes
# make docs        the documentation site, in build/site
# make clean       removes the environment and caches

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: test test-fast lint types types-package types-tests pytest soak quickstart docs clean

test: lint types pytest

# `make quickstart STEPS=20` makes a quick, poor one.
STEPS ?= 2000
quickstart: $(VENV)/installed
	$(BIN)/compressive data prepare text books --name books
	$(BIN)/compressive train quickstart --train.steps $(STEPS) --out runs/quickstart --resume
	$(BIN)/compressive evaluate runs/quickstart --split test --streams 8
	$(BIN)/compressive generate runs/quickstart --prompt-file books/prompts/860-*.txt --length 400
	$(BIN)/compressive analyze runs/quickstart report --tokens 50000 --test-tokens 0
	@echo "open runs/quickstart/report.html"

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Tests need no annotations, but what they call must fit. Other options need another cache.
types: $(VENV)/installed
	$(MAKE) --no-print-directory -j 2 types-package types-tests

types-package: $(VENV)/installed
	$(BIN)/mypy --cache-dir .mypy_cache/package

types-tests: $(VENV)/installed
	$(BIN)/mypy --cache-dir .mypy_cache/tests tests --allow-untyped-defs --allow-incomplete-defs --allow-untyped-calls \
		--allow-untyped-decorators --allow-any-generics --no-warn-return-any

# Each worker keeps to one thread: the models in the tests are tiny, and threads would only fight for cores. The examples
# that Hypothesis makes up are the same every time; `pytest` without that profile tries new ones.
# `worksteal` gives each worker one stretch of files, so that few fixtures are made twice.
pytest: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto --dist worksteal --durations=10 --hypothesis-profile=ci

test-fast: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto --dist worksteal -m "not slow and not soak" --hypothesis-profile=ci

soak: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto -m soak

docs: $(VENV)/installed
	$(BIN)/python tools/docs_site.py build/site-source
	$(BIN)/zensical build -f mkdocs.yml --strict
	@echo "open build/site/index.html"

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,plots,topics,audio,rl,ray,onnx,hf,lm-eval,web,docs]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
