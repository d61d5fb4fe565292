# `make demo` and `make test` are the two commands of the README; each makes .venv first where it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: install demo test lint browser clean

install: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "torch==2.13.0" --constraint constraints.txt
	$(BIN)/python -m pip install --quiet --editable ".[dev,serve,bench]" --constraint constraints.txt
	touch $@

demo: install
	$(BIN)/foregate demo

test: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

browser:
	command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium chromium-driver; }

clean:
	rm -rf $(VENV) build dist *.egg-info
