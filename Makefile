# Each target does all of its own set-up on a fresh machine with Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-network soak golden check docs browser clean

demo: $(READY)
	$(BIN)/fedfac demo

# A test that waits for ever fails, and says where.
test: check
	$(BIN)/pytest -n auto --maxprocesses 4 --timeout 300

# A SuperLink and SuperNodes as real processes on loopback: minutes, so apart from the other tests.
test-network: $(READY)
	$(BIN)/pytest tests/network -n 0 --timeout 600

# The long forms: many kills, many mutations of every file and message that is read. Half an hour or more.
soak: $(READY)
	FEDFAC_KILLS=30 $(BIN)/pytest tests/test_kill.py -n 0 --timeout 3000
	FEDFAC_FUZZ=5000 $(BIN)/pytest tests/fuzz tests/test_fuzz_run.py tests/attacks/test_fuzz_wire.py -n auto --timeout 3000

# What every method comes to, bit by bit, against the commit that tests/golden/BASELINE names: some three minutes.
golden: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/golden/golden.py check

# The fast part of the tests: style and types.
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a web site in site/; broken links and names are errors. It loads nothing from elsewhere.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "in site/index.html"

# Chromium, for the tests of the report; without it (or the right to install it) they are skipped.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	{ command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && \
	{ apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium chromium-driver \
	; } >/dev/null 2>&1 || echo "Chromium is not there and cannot be installed here: tests of the report in it are skipped"; }

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis site
