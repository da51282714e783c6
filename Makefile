# One line per habit. `make run` and `make test` set up what they need.
PYTHON ?= python3
BIN := .venv/bin
SETTINGS := setup.cfg pyproject.toml constraints.txt

.PHONY: run test lint type bench clean .types

run: .venv/.run ; $(BIN)/asyncflow run examples/quickstart.yaml
test: .venv/.dev ; $(BIN)/python -m pytest
lint: .venv/.dev ; $(BIN)/ruff check . && $(BIN)/ruff format --check .
type: .venv/.dev .types ; cd .types && ../$(BIN)/mypy --config-file ../setup.cfg
bench: .venv/.dev ; $(BIN)/python -m benchmarks
clean: ; rm -rf .venv .types build dist runs .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info

# Type checkers do not follow the path that a checkout adds: they see the packages as an installed copy has them.
.types: ; mkdir -p .types/asyncflow && ln -sfn $(CURDIR)/asyncflow/* $(CURDIR)/backends $(CURDIR)/storage .types/asyncflow/
.venv/bin/python: ; $(PYTHON) -m venv .venv
.venv/.run: .venv/bin/python $(SETTINGS) ; $(BIN)/pip install -q -c constraints.txt -e '.[torch,tasks,plot]' && touch $@
.venv/.dev: .venv/.run ; $(BIN)/pip install -q -c constraints.txt -e '.[torch,tasks,plot,data,dev]' && touch $@
