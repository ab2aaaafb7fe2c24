# Everything runs from .venv in the project's root; a target that needs it makes it, once.
PYTHON ?= python3
WORKERS ?= auto
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# One thread per test process: the workers already fill the cores.
test all quick fuzz soak coverage: export OMP_NUM_THREADS ?= 1
# A file to a worker: what its tests share is made once.
# In order of name: by number of tests, the files with few but long ones would come last, and wait for one another.
PYTEST := $(BIN)/pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder

.PHONY: demo test all quick fuzz soak registry tables docs check lint coverage clean
.DEFAULT_GOAL := test

demo: $(INSTALLED)
	$(BIN)/ltm demo

test: $(INSTALLED)
	$(PYTEST) -m "not exhaustive"

all: $(INSTALLED)
	$(PYTEST)

quick: $(INSTALLED)
	$(PYTEST) -m "not slow and not exhaustive" tests/core tests/methods tests/adapters tests/api

# Damaged files of every format, many more than `test` tries.
fuzz: export LTM_FUZZ_CASES ?= 1000
fuzz: $(INSTALLED)
	$(BIN)/pytest tests/fuzz

# Kills training runs, and compares what becomes of them with a run that was not killed; embeds many
# images, and looks at the memory.
soak: export LTM_SOAK_KILLS ?= 20
soak: export LTM_SOAK_ROWS ?= 100000
soak: $(INSTALLED)
	$(BIN)/pytest -s tests/training/test_kills.py tests/deployment/test_embedding.py -k "killed or memory"

# Converts every name of timm's registry on `meta`; prints what converts, and why the others do not.
registry: export LTM_REGISTRY = all
registry: $(INSTALLED)
	$(BIN)/pytest -s tests/adapters/test_registry.py

# All tables and figures of the paper on tiny networks: that everything runs, not what it finds.
tables: $(INSTALLED)
	$(BIN)/python -m reproduction all --scale smoke --processes 2 --output runs/tables-smoke

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

# The site, into site/. Warnings are errors.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict --quiet

check: lint docs test tables

coverage: $(INSTALLED)
	$(PYTEST) --cov --cov-report=term-missing:skip-covered

clean:
	rm -rf $(VENV) build dist site htmlcov .coverage .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# Touched only after a complete install, so a second run does nothing and a broken one starts over.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "ltm needs Python 3.11 or later; name one with: make PYTHON=python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
