# Each target makes its own virtual environment; nothing needs to be installed by hand.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test test-slow lint bench clean

# The main job: two processes on CPU train ResNet-20 on real images with layered SGD and adaptive global batch norm.
demo: $(READY)
	$(BIN)/python recipes/train.py experiment=digits_resnet20

test: $(READY)
	$(BIN)/python -m pytest

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Every file in benchmarks/ runs by itself; what they share is in benchmarks/support/. BENCH_OPTIONS=--smoke: seconds.
bench: $(READY)
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script $(BENCH_OPTIONS); done

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache *.egg-info

# torch first, by exact version: that is what the constraints pin, and what is tested.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "$$(grep ^torch== constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)
