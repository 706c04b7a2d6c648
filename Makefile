# make train   set up, then train examples/digits.py on two virtual devices
# make quick   set up, then what is pure and a tour of the rest: two minutes
# make test    set up, then a sample of all tests: 20 to 40 minutes
# make test PYTEST="tests/pure -q"   these files, or folders, only
# make test-all   every row there is: hours; goes on where it was stopped
# make lint    ruff check, ruff format --check, mypy
# make bench   every benchmark case on 2 and 4 virtual devices
# make site    the docs as a site in out/site; any warning ends it
# make versions   the quick tests with every version that setup.cfg allows: hours
#              VERSIONS="py3.10-tf2.21-keras3.12" picks some; VERSIONS=nightly
#              runs with Keras' nightly
#
# EXTRA picks the TensorFlow: cpu (default), gpu or tpu, as in `make train EXTRA=gpu`.
# PYTHON picks the interpreter that makes the virtual environment: 3.10 to 3.13.

EXTRA ?= cpu
PYTHON ?= python3
# Tests at a time, by this machine's cores and memory. Files stay whole, their tests share
# fixtures. Tests with processes of their own have two cores each to themselves.
JOBS ?= $(shell $(PYTHON) tests/support/jobs.py)
JOBS_ALONE ?= $(shell $(PYTHON) tests/support/jobs.py --alone)
PARALLEL = -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
VENV := .venv
BIN := $(VENV)/bin
# The site is made from sources; nothing of tfdp is imported.
SITE_VENV := .venv-site
# Made last, and named for the extra: a second run, or one after a failed install,
# does what is missing and no more.
STAMP := $(VENV)/.installed-$(EXTRA)
# What the examples need and no more, for who only wants to see one train.
EXAMPLES_STAMP := $(VENV)/.examples-$(EXTRA)

.PHONY: train quick test test-all lint bench site versions clean
.DELETE_ON_ERROR:

train: $(if $(wildcard $(STAMP)),$(STAMP),$(EXAMPLES_STAMP))
	$(BIN)/python examples/digits.py
	@printf '%s\n' "tfdp is in $(VENV). Next:" "  source $(BIN)/activate" \
	  "  python YOUR_SCRIPT.py       # with tfdp.auto_strategy(), as in README.md" \
	  "  tfdp check YOUR_SCRIPT.py   # whether it trains as on one device"

quick: $(STAMP)
	$(BIN)/python -m pytest --tier quick $(PARALLEL) tests/pure tests/devices

test: $(STAMP)
ifeq ($(PYTEST),)
	$(BIN)/python -m tests.both_halves --jobs $(JOBS) --jobs-alone $(JOBS_ALONE)
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
	$(BIN)/python -m benchmarks.bench --devices 2 4

# README.md and docs/ as they lie in the repository, so that links are the same.
site: $(SITE_VENV)/.installed
	rm -rf out/site-source out/site
	mkdir -p out/site-source
	cp -r README.md CONTRIBUTING.md CHANGELOG.md CITATION.cff LICENSE constraints.txt \
	  docs examples deploy out/site-source
	rm -r out/site-source/docs/notes
	NO_MKDOCS_2_WARNING=1 $(SITE_VENV)/bin/mkdocs build --strict

# Any Python will do: those that the tests run with are found by their versions.
versions: | $(BIN)/python
	nice -n 10 $(BIN)/python -m tests.versions $(VERSIONS)

clean:
	rm -rf $(VENV) $(SITE_VENV) build *.egg-info out/site-source out/site

$(STAMP): setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -e '.[$(EXTRA),examples,dev,tfds,grain,plots]' -c constraints.txt
	touch $@

$(EXAMPLES_STAMP): setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -e '.[$(EXTRA),examples]' -c constraints.txt
	touch $@

# What the extra `docs` names and no more: tfdp, which would bring Keras, is read and not
# imported.
DOCS := import configparser; setup = configparser.ConfigParser(); \
  setup.read("setup.cfg"); print(setup["options.extras_require"]["docs"])

$(SITE_VENV)/.installed: setup.cfg constraints.txt
	$(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/python -c '$(DOCS)' > $(SITE_VENV)/requirements.txt
	$(SITE_VENV)/bin/python -m pip install -r $(SITE_VENV)/requirements.txt \
	  -c constraints.txt
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
