# Requires only make and Python 3.11 to 3.14. Each target creates .venv if needed.
#
#   make demo    trains, evaluates and decodes a small language model (about 4 minutes)
#   make test    runs the quick tests (4.5 minutes)
#   make test-all  runs the quick tests, then the slow tests: processes, kills, all meshes (25 minutes)
#   make nightly   runs the tests that take too long for CI, and then all of these (hours):
#     make faults     kills processes, damages files and fills disks, hundreds of times (an hour)
#     make chaos      kills, stops and restarts hosts of an elastic job 100 times (an hour)
#     make check-defects  plants hundreds of defects; reports which --mode=check detects (an hour)
#     make mutants    plants 300 small bugs in the library; reports which tests detect them (hours)
#     make test-next  runs the quick tests with the newest jax, flax, optax, orbax and grain on PyPI,
#                     and with their future default settings (Python 3.12 or newer)
#     make test-oldest  runs the quick tests with the oldest versions that pyproject.toml allows
#                       (Python 3.11 or 3.12)
#   make test-wheel  builds the wheel, installs it without extras, and tests it outside the checkout
#   make lock    updates requirements-dev.lock
#   make lint    checks style and format with ruff, and types with mypy and pyright
#   make release-check  builds a release, its documentation and an empty environment with it, trains
#                  and decodes there, and checks the licenses of all dependencies (TAG=v1.0.0 checks
#                  the version too)
#   make release-job    writes tests/releases/VERSION, a small job that later versions must load
#   make docs    builds the site of the docs in build/site (4 minutes)
#   make docs-pictures  opens ten of its pages at two widths in Chromium, and saves pictures
#   make clean   removes everything that the other targets created, except the demo's results
#
#   make PYTHON=python3.12 ...          uses a different interpreter
#   make demo JOB_LOG_DIR=/tmp/demo     writes the demo's files to a different directory, or to a URL
#   make test PYTEST_ARGS='-k metrics'  passes other arguments to pytest

PYTHON ?= python3
JOB_LOG_DIR ?= demo_job
# Two processes. The tests of a file run in one process, because they share compiled programs.
PYTEST_ARGS ?= -n 2 --dist loadfile
# Many slow tests wait for other processes, so three keep two cores busy.
SLOW_PYTEST_ARGS ?= -n 3 --dist loadfile
# Quick tests of features that the plain install contains.
WHEEL_TESTS := tests/checkpoints tests/config tests/decode tests/optimizers tests/tasks \
  --ignore tests/decode/test_continuation_text.py --ignore tests/tasks/test_image_classification.py

VENV := .venv
# The newest releases of the libraries, even if pyproject.toml does not allow them.
VENV_NEXT := .venv-next
# The lower bounds in pyproject.toml.
VENV_OLDEST := .venv-oldest
# The plain install of the wheel.
VENV_WHEEL := .venv-wheel
VENV_PYTHON := $(VENV)/bin/python
# Marker files: the empty environment, the install with plots, and the install with everything that
# the tests need.
CREATED := $(VENV)/.created
INSTALLED := $(VENV)/.installed
TESTING := $(VENV)/.installed_test
# The install with everything that the site needs.
DOCUMENTING := $(VENV)/.installed_docs

# Tests launch hundreds of processes. Without cached bytecode, each would compile all packages again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all nightly test-nightly test-next test-oldest \
  test-wheel lock faults chaos check-defects mutants lint ruff mypy pyright docs docs-pictures release-check release-job clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

demo: $(INSTALLED)
	@if [ -z "$(JOB_LOG_DIR)" ]; then echo "JOB_LOG_DIR is empty. Set it to a directory."; exit 1; fi
	@# The demo always starts a new job. It removes only directories that praxis_lite created, and
	@# nothing in object stores.
	@case "$(JOB_LOG_DIR)" in *://*) \
	  $(VENV_PYTHON) -m pip install -qq --disable-pip-version-check --editable '.[plots,s3,gcs]' || exit 1; \
	  if $(VENV_PYTHON) main.py --mode=summary --job_log_dir="$(JOB_LOG_DIR)" >/dev/null 2>&1; then \
	    echo "$(JOB_LOG_DIR) already contains a job. Use a different URL."; exit 1; \
	  fi;; \
	*) if [ -n "$$(ls -A "$(JOB_LOG_DIR)" 2>/dev/null)" ]; then \
	  if grep -qs praxis_lite "$(JOB_LOG_DIR)/config.json"; then rm -rf "$(JOB_LOG_DIR)"; else \
	    echo "$(JOB_LOG_DIR) is not empty and does not contain a praxis_lite job (a config.json)."; \
	    echo "Remove it, or use a different directory: make demo JOB_LOG_DIR=..."; exit 1; \
	  fi; fi;; esac
	@$(VENV_PYTHON) main.py --exp=lm.PyDocs --job_log_dir="$(JOB_LOG_DIR)"
	@$(VENV_PYTHON) main.py --mode=decode --job_log_dir="$(JOB_LOG_DIR)"
	@$(VENV_PYTHON) main.py --mode=summary --job_log_dir="$(JOB_LOG_DIR)"

test: $(TESTING)
	@$(VENV_PYTHON) -m pytest -m "not slow and not nightly" $(PYTEST_ARGS)

test-all: test
	@$(VENV_PYTHON) -m pytest -m "slow and not nightly" $(SLOW_PYTEST_ARGS)

# If one part fails, the other parts still run.
nightly: $(TESTING)
	@$(MAKE) --keep-going test-nightly faults chaos check-defects mutants test-next test-oldest

test-nightly: $(TESTING)
	@$(VENV_PYTHON) -m pytest -m nightly $(PYTEST_ARGS)

# Creates the virtual environment $(1), if $(PYTHON) is Python 3.$(2) to 3.$(3); $(4) explains the
# limits.
define new_venv
@"$(PYTHON)" -c 'import sys; sys.exit(not (3, $(2)) <= sys.version_info[:2] <= (3, $(3)))' || { \
  echo "$(4), but $(PYTHON) is $$("$(PYTHON)" -V 2>&1)."; \
  echo "Use a different interpreter: make $@ PYTHON=/path/to/python3.12"; exit 1; }
@echo "Setting up $(1). This takes a few minutes each time."
@"$(PYTHON)" -m venv --clear $(1)
endef

test-next:
	$(call new_venv,$(VENV_NEXT),12,14,The newest jax needs Python 3.12 or newer)
	@$(VENV_NEXT)/bin/python -m pip install -qq --disable-pip-version-check --editable '.[test]'
	@$(VENV_NEXT)/bin/python -m pip install -qq --disable-pip-version-check --upgrade \
	  jax flax optax orbax-checkpoint grain
	@$(VENV_NEXT)/bin/python -m tests.support.next_versions $(PYTEST_ARGS)

test-oldest:
	$(call new_venv,$(VENV_OLDEST),11,12,The oldest versions need Python 3.11 or 3.12)
	@"$(PYTHON)" -m tests.support.oldest_versions > $(VENV_OLDEST)/constraints.txt
	@$(VENV_OLDEST)/bin/python -m pip install -qq --disable-pip-version-check \
	  --constraint $(VENV_OLDEST)/constraints.txt --editable '.[test]'
	@$(VENV_OLDEST)/bin/python -m pytest -m "not slow and not nightly" $(PYTEST_ARGS)

# Copies the tests, so that they import the installed package and not the checkout.
test-wheel:
	@"$(PYTHON)" -m venv --clear $(VENV_WHEEL)
	@$(VENV_WHEEL)/bin/python -m pip wheel -qq --disable-pip-version-check --no-deps \
	  --wheel-dir $(VENV_WHEEL)/dist .
	@$(VENV_WHEEL)/bin/python -m pip install -qq --disable-pip-version-check \
	  $(VENV_WHEEL)/dist/*.whl pytest pytest-xdist
	@mkdir $(VENV_WHEEL)/empty
	@cp -r pyproject.toml tests $(VENV_WHEEL)/empty
	@cd $(VENV_WHEEL)/empty && ../bin/python -m pytest -m "not slow and not nightly" $(PYTEST_ARGS) \
	  $(WHEEL_TESTS)

lock:
	@$(VENV_PYTHON) -m pip install -qq --disable-pip-version-check uv
	@$(VENV_PYTHON) -m uv pip compile --quiet --universal --upgrade --extra test --no-annotate \
	  --custom-compile-command "make lock" --output-file requirements-dev.lock pyproject.toml

faults: $(TESTING)
	@$(VENV_PYTHON) -m tests.faults --report docs/faults_report.md $(FAULTS_ARGS)

chaos: $(TESTING)
	@$(VENV_PYTHON) -m tests.elastic.chaos --dir=chaos_job --report docs/elastic_report.md $(CHAOS_ARGS)

check-defects: $(TESTING)
	@$(VENV_PYTHON) -m tests.tools.check.defects --report docs/check_defects.md $(DEFECTS_ARGS)

# Resumes after an interruption. A file that pytest cannot run alone is reported and skipped.
mutants: $(TESTING)
	@# Continues an interrupted run.
	-@[ -e mutants_job/faults.json ] || $(VENV_PYTHON) -m tests.support.reached_faults mutants_job
	@$(VENV_PYTHON) -m tests.support.mutants run --reached mutants_job --out mutants_job/mutants.jsonl \
	  $(MUTANTS_ARGS)
	@$(VENV_PYTHON) -m tests.support.mutants table mutants_job/mutants.jsonl --reached mutants_job

lint: ruff mypy pyright

ruff: $(TESTING)
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m ruff format --check .

mypy: $(TESTING)
	@$(VENV_PYTHON) -m mypy
	@$(VENV_PYTHON) -m mypy --strict tests/typing/user_program.py

pyright: $(TESTING)
	@$(VENV)/bin/basedpyright --pythonpath $(VENV_PYTHON)

release-check: $(TESTING)
	@$(MAKE) docs test-wheel
	@$(VENV_PYTHON) -m tests.releases.check $(if $(TAG),--tag "$(TAG)")

release-job: $(TESTING)
	@$(VENV_PYTHON) -m tests.releases.releases

# A warning, a link to nothing and a public name without a docstring are errors.
docs: $(DOCUMENTING)
	@$(VENV_PYTHON) -m tests.support.site $(DOCS_ARGS)

docs-pictures: docs
	@$(VENV_PYTHON) -m tests.support.site_pictures

clean:
	rm -rf $(VENV) $(VENV_NEXT) $(VENV_OLDEST) $(VENV_WHEEL) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment without packages. All marker files are created last, so a failed installation is
# repeated.
$(CREATED): pyproject.toml setup.py
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "$(PYTHON) was not found. praxis_lite needs Python 3.11 to 3.14."; \
	  echo "If it has a different name: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' || { \
	  echo "praxis_lite needs Python 3.11 to 3.14, but $(PYTHON) is $$("$(PYTHON)" -V 2>&1)."; \
	  echo "Use a different interpreter: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot create virtual environments: its venv or ensurepip module is missing."; \
	  echo "On Debian and Ubuntu, run: apt install python3-venv"; exit 1; }
	@[ ! -L $(VENV) ] || { \
	  echo "$(VENV) is a symbolic link, and its target would be deleted. Remove the link."; exit 1; }
	@"$(PYTHON)" -m venv --clear $(VENV)
	@touch $@

$(INSTALLED): $(CREATED)
	@echo "Installing jax, flax, ... in $(VENV). This takes a few minutes, only once."
	@$(VENV_PYTHON) -m pip install -qq --disable-pip-version-check --editable '.[plots]'
	@touch $@

# Python compiles a module when it is first imported. Most modules of torch, tensorflow and
# transformers are never imported, so compiling all of them would only take time.
$(TESTING): $(CREATED)
	@echo "Installing all that the tests need in $(VENV). This takes a few minutes, only once."
	@$(VENV_PYTHON) -m pip install -qq --no-compile --disable-pip-version-check --editable '.[test]'
	@touch $(INSTALLED) $@

$(DOCUMENTING): $(INSTALLED)
	@echo "Installing the packages that the site needs. This takes a minute or two, only once."
	@$(VENV_PYTHON) -m pip install -qq --disable-pip-version-check --editable '.[docs]'
	@touch $@
