# GNU make and a Python of 3.11 or later are all it takes: every target makes its own environment in
# .venv first, and a second call installs nothing. pip's environment variables and pip's own
# configuration hold.

PYTHON ?= python3
ARGS ?=
PYTHON_ENV ?=
# Processes that run tests, of a thread each: one more than two cores, for many tests wait for processes
# that they have started (two kept the cores busy for two thirds of the time). A file's tests stay in one
# of them, which keeps the plans and references that they share. Tests start many processes, each of
# which would compile what the first one has compiled already.
JOBS ?= 3
TEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

VENV := .venv
TORCHREC := .venv-torchrec
STAMP := $(VENV)/.installed

ifeq ($(PYTHON_ENV),)
BIN := $(VENV)/bin
ENVIRONMENT := $(STAMP)
RUN := "$(BIN)/python"
else
BIN := $(PYTHON_ENV)/bin
ENVIRONMENT := existing
# This tree's sources come first, whatever is installed there.
RUN := PYTHONPATH="$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}" "$(BIN)/python"
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-products test-torchrec check docs existing

help:
	@printf '%s\n' \
	  'make demo           plan, train, compare and report on this machine: two ranks, about a minute' \
	  'make test           run the tests that are not slow    ARGS="-k name" goes to pytest' \
	  'make test-all       run the slow ones, too: of many combinations of parameters those with all pairs' \
	  'make test-products  run all tests with every combination of parameters, and 500 cases of a property: hours' \
	  'make test-torchrec  tests of the planner for TorchRec, beside TorchRec in $(TORCHREC)' \
	  'make docs           the documentation as a site, site/index.html' \
	  'make check          lint, format, types, floors' \
	  'make setup          only make the environment in $(VENV)' \
	  '' \
	  'PYTHON=/path/to/python3       the interpreter that $(VENV) is made with (3.11 or later)' \
	  'PYTHON_ENV=/path/to/venv      use this environment as it is and install nothing'

setup: $(ENVIRONMENT)
	@echo 'ready: $(BIN)'

demo: $(ENVIRONMENT)
	@$(RUN) -m shardwright demo $(ARGS)

test: CHOSEN := -m 'not slow and not product'
test-all: CHOSEN := -m 'not product'
test-products: CHOSEN := --hypothesis-profile thorough
test test-all test-products: $(ENVIRONMENT)
	@$(TEST) $(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(CHOSEN) $(ARGS)

test-torchrec: $(TORCHREC)/.installed
	@PYTHONPATH="$(CURDIR)/src:$(CURDIR)/validation" $(TEST) "$(TORCHREC)/bin/python" -m pytest -n $(JOBS) -m "not product" $(ARGS) tests/torchrec/adapter

# Beside the environment of all other targets, whose torch it reads: TorchRec and what it needs.
$(TORCHREC)/.installed: requirements-torchrec.txt $(ENVIRONMENT)
	@"$(BIN)/python" -m venv --clear --without-pip $(TORCHREC)
	@"$(BIN)/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$("$(TORCHREC)/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	@"$(BIN)/python" -m pip --python "$(TORCHREC)/bin/python" install --quiet --no-deps -r requirements-torchrec.txt
	@touch $@

check: $(ENVIRONMENT)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) "$(BIN)/lint-imports"

docs: $(ENVIRONMENT)
ifeq ($(PYTHON_ENV),)
	@"$(BIN)/python" -m pip install --quiet -c constraints.txt -e '.[docs]'
endif
	@$(RUN) -m sphinx -q -W --keep-going -b html docs site
	@echo 'made site/index.html'

$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { echo 'make: expected Python 3.11 or later as $(PYTHON), got no such program. Install it, or name one: make PYTHON=/path/to/python3' >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: expected Python 3.11 or later as $(PYTHON), got $$("$(PYTHON)" -V 2>&1). Name another: make PYTHON=/path/to/python3" >&2; exit 2; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo 'make: expected the venv module of $(PYTHON), got none. Install it (Debian and Ubuntu: the package python3-venv), or name another: make PYTHON=/path/to/python3' >&2; exit 2; }
	@echo 'making $(VENV): about a minute and 1.1 GB with the CPU build of torch, several GB with another; once' >&2
	@"$(BIN)/python" -c '' 2>/dev/null || "$(PYTHON)" -m venv --clear $(VENV)
	@"$(BIN)/python" -m pip install -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

existing:
	@"$(BIN)/python" -c '' 2>/dev/null || { echo 'make: PYTHON_ENV: expected an environment with bin/python, got $(PYTHON_ENV).' >&2; exit 2; }
