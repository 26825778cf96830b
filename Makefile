# Needs only make and Python 3.11 to 3.14; each target sets up .venv by itself.
#
#   make demo    trains, evaluates and decodes a small language model (about 4 minutes)
#   make demo-multiprocess  two processes train as one does, their losses compared (2 minutes)
#   make test    runs the tests of everything that matters (6 minutes)
#   make test-all  runs them and then the slow ones: processes, kills, every mesh (30 minutes; CI)
#   make nightly   runs the tests that are too long for CI, and then all of these (hours):
#     make faults     kills, damages and fills disks, hundreds of times; about half an hour
#     make chaos      kills, stops and returns hosts of an elastic job, 100 times; about an hour
#     make check-defects  plants hundreds of defects and reports which --mode=check catches; an hour
#     make mutants    plants 300 small faults in the library and reports which tests notice; hours
#     make test-next  runs the quick tests on the newest jax, flax, optax, orbax and grain of PyPI,
#                     with the settings that these will make the default (Python 3.12 or newer)
#   make lint    checks the style, and types with mypy and pyright
#   make clean   removes what the others made, but for the demo's results
#
#   make PYTHON=python3.12 ...          another interpreter
#   make demo JOB_LOG_DIR=/tmp/demo     other place for the results
#   make test PYTEST_ARGS='-k metrics'  other arguments for pytest

PYTHON ?= python3
JOB_LOG_DIR ?= demo_job
# Two processes; a file's tests stay together, for they share what they compiled.
PYTEST_ARGS ?= -n 2 --dist loadfile

VENV := .venv
# The newest libraries, beyond the versions that setup.py allows.
VENV_NEXT := .venv-next
VENV_PYTHON := $(VENV)/bin/python
# The plain installation and what draws; and all that the tests need.
INSTALLED := $(VENV)/.installed
TESTING := $(VENV)/.installed_test

.PHONY: help demo demo-multiprocess test test-all nightly test-nightly test-next faults chaos check-defects mutants lint clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

demo: $(INSTALLED)
	@if [ -z "$(JOB_LOG_DIR)" ]; then echo "JOB_LOG_DIR is empty: name a directory."; exit 1; fi
	@# The demo starts from nothing, and removes nothing but what praxis_lite made.
	@if [ -n "$$(ls -A "$(JOB_LOG_DIR)" 2>/dev/null)" ]; then \
	  if grep -qs praxis_lite "$(JOB_LOG_DIR)/config.json"; then rm -rf "$(JOB_LOG_DIR)"; else \
	    echo "$(JOB_LOG_DIR) is not empty and no praxis_lite job (it has no config.json of one)."; \
	    echo "Remove it yourself, or choose another place: make demo JOB_LOG_DIR=..."; exit 1; \
	  fi; fi
	@$(VENV_PYTHON) main.py --exp=lm.PyDocs --job_log_dir="$(JOB_LOG_DIR)"
	@$(VENV_PYTHON) main.py --mode=decode --job_log_dir="$(JOB_LOG_DIR)"
	@$(VENV_PYTHON) main.py --mode=summary --job_log_dir="$(JOB_LOG_DIR)"

demo-multiprocess: $(INSTALLED)
	@$(VENV_PYTHON) benchmarks/demo_multiprocess.py

test: $(TESTING)
	@$(VENV_PYTHON) -m pytest -m "not slow and not nightly" $(PYTEST_ARGS)

test-all: test
	@$(VENV_PYTHON) -m pytest -m "slow and not nightly" $(PYTEST_ARGS)

# The part of one night that fails does not end the others.
nightly: $(TESTING)
	@$(MAKE) --keep-going test-nightly faults chaos check-defects mutants test-next

test-nightly: $(TESTING)
	@$(VENV_PYTHON) -m pytest -m nightly $(PYTEST_ARGS)

test-next:
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 15))' || { \
	  echo "The newest jax needs Python 3.12 or newer, and $(PYTHON) is $$("$(PYTHON)" -V 2>&1)."; \
	  echo "Name another: make test-next PYTHON=/path/to/python3.13"; exit 1; }
	@echo "Setting up $(VENV_NEXT): takes some minutes, each time."
	@"$(PYTHON)" -m venv --clear $(VENV_NEXT)
	@$(VENV_NEXT)/bin/python -m pip install -qq --disable-pip-version-check --editable '.[test]'
	@$(VENV_NEXT)/bin/python -m pip install -qq --disable-pip-version-check --upgrade \
	  jax flax optax orbax-checkpoint grain
	@$(VENV_NEXT)/bin/python -m tests.support.next_versions $(PYTEST_ARGS)

faults: $(TESTING)
	@$(VENV_PYTHON) -m tests.faults --report docs/faults_report.md $(FAULTS_ARGS)

chaos: $(TESTING)
	@$(VENV_PYTHON) -m tests.elastic.chaos --dir=chaos_job --report docs/elastic_report.md $(CHAOS_ARGS)

check-defects: $(TESTING)
	@$(VENV_PYTHON) -m tests.tools.check.defects --report docs/check_defects.md $(DEFECTS_ARGS)

# Resumes where it was stopped. A file that pytest cannot run by itself is reported, and left out.
mutants: $(TESTING)
	-@$(VENV_PYTHON) -m tests.support.reached_lines mutants_job
	@$(VENV_PYTHON) -m tests.support.mutants run --reached mutants_job --out mutants_job/mutants.jsonl \
	  $(MUTANTS_ARGS)
	@$(VENV_PYTHON) -m tests.support.mutants table mutants_job/mutants.jsonl --reached mutants_job

lint: $(TESTING)
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m ruff format --check .
	@$(VENV_PYTHON) -m mypy
	@$(VENV_PYTHON) -m mypy --strict tests/typing/user_program.py
	@$(VENV)/bin/basedpyright --pythonpath $(VENV_PYTHON)

clean:
	rm -rf $(VENV) $(VENV_NEXT) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The mark is made last: an installation that failed is begun again.
$(INSTALLED): setup.py
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "There is no $(PYTHON). praxis_lite needs Python 3.11 to 3.14; where it has"; \
	  echo "another name: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' || { \
	  echo "praxis_lite needs Python 3.11 to 3.14, and $(PYTHON) is $$("$(PYTHON)" -V 2>&1)."; \
	  echo "Name another: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: its venv and ensurepip modules are missing."; \
	  echo "On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@[ ! -L $(VENV) ] || { \
	  echo "$(VENV) is a link: the environment behind it would be emptied. Remove the link."; exit 1; }
	@echo "Setting up $(VENV) (jax, flax, tensorflow, ...): takes some minutes, once."
	@"$(PYTHON)" -m venv --clear $(VENV)
	@$(VENV_PYTHON) -m pip install -qq --disable-pip-version-check --editable '.[plots]'
	@touch $@

$(TESTING): $(INSTALLED)
	@echo "Installing what the tests need: takes a minute or two, once."
	@$(VENV_PYTHON) -m pip install -qq --disable-pip-version-check --editable '.[test]'
	@touch $@
