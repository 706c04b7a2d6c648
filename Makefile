# make train   set up, then train examples/digits.py on two virtual devices
# make quick   set up, then what is pure and a tour of the rest: two minutes
# make test    set up, then every test function that is not long: 25 minutes
# make test PYTEST="tests/pure -q"   these files, or folders, only
# make test-all   every row there is: hours; goes on where it was stopped
# make lint    ruff check, ruff format --check, mypy
# make bench   every benchmark case on 2 and 4 virtual devices
#
# EXTRA picks the TensorFlow: cpu (default), gpu or tpu, as in `make train EXTRA=gpu`.
# PYTHON picks the interpreter that makes the virtual environment: 3.10 to 3.13.

EXTRA ?= cpu
PYTHON ?= python3
# Test processes at a time, of 3 GB each. Files stay whole, their tests share fixtures.
JOBS ?= 2
PARALLEL := -n $(JOBS) --dist loadfile --max-worker-restart 0
VENV := .venv
BIN := $(VENV)/bin
# Made last, and named for the extra: a second run, or one after a failed install,
# does what is missing and no more.
STAMP := $(VENV)/.installed-$(EXTRA)

.PHONY: train quick test test-all lint bench clean
.DELETE_ON_ERROR:

train: $(STAMP)
	$(BIN)/python examples/digits.py

quick: $(STAMP)
	$(BIN)/python -m pytest --tier quick $(PARALLEL) tests/pure tests/devices

# Tests with processes of their own have the cores to themselves.
test: $(STAMP)
ifeq ($(PYTEST),)
	$(BIN)/python -m pytest $(PARALLEL) tests/pure tests/devices
	$(BIN)/python -m pytest tests/processes tests/network
else
	$(BIN)/python -m pytest $(PYTEST)
endif

test-all: $(STAMP)
	$(BIN)/python -m tests.all_rows --jobs $(JOBS) $(ALL_ROWS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/tfdp bench --devices 2 4

clean:
	rm -rf $(VENV) build *.egg-info

$(STAMP): setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -e '.[$(EXTRA),examples,dev,tfds]' -c constraints.txt
	touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "tfdp needs Python 3.10 to 3.13; '$(PYTHON)' was not found." \
	    "Install it, or name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "tfdp needs Python 3.10 to 3.13; '$(PYTHON)' is $$($(PYTHON) --version)." \
	    "Name another: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "Making the virtual environment failed; on Debian or" \
	    "Ubuntu: apt-get install python3-venv" >&2; exit 1; }
