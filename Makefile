# `make demo` and `make test` are the two commands of the README; each makes .venv first where it is missing.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: install demo test lint browser clean

install: $(STAMP)

# Touched last, so that an interrupted installation is taken up again.
$(STAMP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "foregate needs Python 3.11 or newer; run make PYTHON=python3.12, say." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment; install its venv module." >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,serve,bench]"
	@touch $@

demo: install
	$(BIN)/foregate demo

# Two workers, since most of a test's time is one thread's; a file's tests stay together, as its fixtures do, and
# files are handed out in the order of tests/conftest.py, those that take longest first.
test: install
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Only the browser tests need it; they skip, visibly, where it is missing.
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then \
		echo "Chromium is installed."; \
	elif command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq chromium chromium-driver >/dev/null; then \
		echo "Chromium was installed."; \
	else \
		echo "Chromium could not be installed here; the browser tests will be skipped." >&2; \
	fi

clean:
	rm -rf $(VENV) build dist *.egg-info
