# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test venv format bench clean

train: .venv/installed
	$(BIN)/llamarl train

test: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest

venv: .venv/dev

# The stamps are newer than pyproject.toml once an install has succeeded, so a changed dependency is installed again.
.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

.venv/dev: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@ .venv/installed

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
