# Each target makes the environment it needs: on a fresh machine, Python 3.11 or newer and make are enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
# The demonstration and the tests emulate devices; libtpu, which the tests compile with, would look for a TPU and say so.
export JAX_PLATFORMS ?= cpu

.PHONY: demo test test-all lint docs clean

demo: $(STAMP)
	$(BIN)/shardlib explain models.gpt:small --mesh data=2,fsdp=2,tensor=2
	$(BIN)/shardlib train models.gpt:small --mesh data=2,fsdp=2,tensor=2 --devices cpu --steps 40 --oracle

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not exhaustive" --ignore tests/docs

# The exhaustive tier; a shard of it with SHARD=1/4, resumable because every shard is independent.
SHARD ?= 1/1
test-all: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --shard $(SHARD)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# Every example of the README and the documentation, as a reader would run it.
docs: $(STAMP)
	$(BIN)/python -m pytest -q tests/docs

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-newest build dist .pytest_cache .ruff_cache
