# Each target but gpu-check makes the virtual environment that it needs; nothing needs to be installed by hand.
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
DOCS    := $(VENV)/.docs
# Of the tests that run side by side. Many start two processes each.
WORKERS ?= 2
PIP     := pip install --quiet --disable-pip-version-check
# Without a restart, a worker that crashes ends the run; with one, xdist can wait forever at the end.
PYTEST  := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
ALL     := $(PYTEST) -m "not slow and not repository and not docs"

.PHONY: demo test test-ci test-slow test-oldest test-newest test-torch test-lightning coverage mutants lint hooks bench gpu-check docs clean

# The main job: two processes on CPU train ResNet-20 on real images with layered SGD and adaptive global batch norm.
demo: $(READY)
	$(BIN)/python recipes/train.py experiment=digits_resnet20

test: $(READY)
	$(BIN)/python $(PYTEST)

# What takes seconds each: `make test` and this are what CI runs.
test-ci: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist load --max-worker-restart 0 -m "ci and not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist load -m slow

# The lower bounds of pyproject.toml, in an environment of their own. Old packages use what newer ones deprecate. The
# index may have such a torch for GPUs only, which is gigabytes.
test-oldest: .venv-oldest/.ready
	.venv-oldest/bin/python $(ALL) -W ignore::DeprecationWarning -W ignore::PendingDeprecationWarning

# The newest versions, in an environment of their own. The index may have torch for GPUs only, which is gigabytes.
test-newest: .venv-newest/.ready
	.venv-newest/bin/python $(ALL)

# Another torch beside the pins: make test-torch TORCH=2.15.0 [TESTS="tests/layers tests/callbacks"]. In an environment of
# its own, which is removed afterwards: the index has torch for GPUs only, 5 to 7 GB, which runs on CPU as well.
test-torch:
	@test -n "$(TORCH)" || { echo "which torch? make test-torch TORCH=2.15.0" >&2; exit 2; }
	set -e; trap 'rm -rf .venv-torch' EXIT; trap 'exit 130' INT TERM; \
	$(PYTHON) -m venv .venv-torch; \
	grep -v "^torch==" constraints.txt > .venv-torch/constraints.txt; \
	.venv-torch/bin/$(PIP) --no-cache-dir "torch==$(TORCH)"; \
	.venv-torch/bin/$(PIP) -c .venv-torch/constraints.txt -e ".[test]"; \
	.venv-torch/bin/python $(ALL) $(TESTS)

# Lines and branches, also of the processes that tests start. These have other working folders, hence the variable.
coverage: export COVERAGE_FILE = $(CURDIR)/.coverage
coverage: $(READY)
	$(BIN)/coverage erase
	$(BIN)/coverage run $(ALL)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# Puts small faults into a copy of the package, and says which of them no test sees. About an hour.
mutants: $(READY)
	$(BIN)/python .ci/mutants.py $(MUTANTS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python -m pytest -q -m "repository and not slow"

# Lightning's own tests with our strategies in DDP's place. LIGHTNING=DIR: a checkout of the installed version's source.
test-lightning: $(READY)
ifdef LIGHTNING
	$(BIN)/python -m tests.upstream.run "$(LIGHTNING)"
else
	@echo "SKIPPED: Lightning's own tests. Give a checkout of Lightning's source: make test-lightning LIGHTNING=DIR"
endif

# Run the checks of .pre-commit-config.yaml before each commit.
hooks: $(READY)
	$(BIN)/pre-commit install

# Every file in benchmarks/ runs by itself; what they share is in benchmarks/support/. With BENCH_OPTIONS=--smoke each
# takes seconds.
bench: $(READY)
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script $(BENCH_OPTIONS); done

# Tests and measurements on one GPU, in at most 10 minutes. No environment is made: torch, Lightning and pytest are those
# of PYTHON.
gpu-check:
	PYTHONPATH="$(CURDIR)" $(PYTHON) benchmarks/gpu_check.py $(BENCH_OPTIONS)

# The documentation site, in build/site, and what its pages claim. Warnings are errors. The variable silences an advertisement of the theme.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m pytest -q -m "docs and not slow"

clean:
	rm -rf .venv .venv-oldest .venv-newest .venv-torch .coverage* .mypy_cache .pytest_cache .ruff_cache *.egg-info

# torch first, by exact version: that is what the constraints pin, and what is tested.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(PIP) -c constraints.txt "$$(grep ^torch== constraints.txt)"
	$(BIN)/$(PIP) -c constraints.txt -e ".[dev]"
	touch $@

.venv-oldest/.ready: pyproject.toml .ci/floors.py
	$(PYTHON) -m venv .venv-oldest
	$(PYTHON) .ci/floors.py > .venv-oldest/floors.txt
	.venv-oldest/bin/$(PIP) -r .venv-oldest/floors.txt
	.venv-oldest/bin/$(PIP) -e ".[test]"
	touch $@

.venv-newest/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/$(PIP) --upgrade -e ".[test]"
	touch $@

$(DOCS): $(READY)
	$(BIN)/$(PIP) -c constraints.txt -e ".[docs]"
	touch $@
