# Each target does all of its own set-up on a fresh machine with Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-network check clean

demo: $(READY)
	$(BIN)/fedfac demo

test: check
	$(BIN)/pytest -n auto --maxprocesses 4

# A SuperLink and SuperNodes as real processes on loopback: minutes, so apart from the other tests.
test-network: $(READY)
	$(BIN)/pytest tests/network -n 0

# The fast part of the tests: style and types.
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
