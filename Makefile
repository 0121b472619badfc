# The two commands of the README. Each makes its own virtual environment: nothing has to be installed first but
# Python 3.10 or newer with venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-

CLUSTER_TESTS := -m pytest tests/cluster --durations=10
CLUSTER_LOG := build/cluster-tests.log
IN_CONTAINER := docker build -t ctxflow-testbed --build-arg UP_OPTIONS=--with-torch -f testbed/Dockerfile . && \
	docker run --rm --init --privileged --tmpfs /run:exec ctxflow-testbed /opt/ctxflow/bin/python $(CLUSTER_TESTS)

.PHONY: demo test test-local test-cluster test-cluster-beside test-cluster-docker lint clean help

help: ## Show what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "ctxflow needs Python 3.10 or newer: set PYTHON=python3.X"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "install venv first (Debian: apt-get install python3-venv)"; exit 1; }

$(STAMP)example: $(BIN)/python setup.cfg pyproject.toml constraints.txt
	@echo "Installing ctxflow with the example's needs into $(VENV) (once, about a minute) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[example]'
	@touch $@

$(STAMP)test: $(STAMP)example
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[example,policies,test]'
	@touch $@

demo: $(STAMP)example ## Run the main example on this machine, with evictions
	@$(BIN)/ctxflow demo

lint: $(STAMP)test ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint ## Check, and run all tests that can run here
	@echo "The tests that need the testbed run beside the others; what they print follows when they end ($(CLUSTER_LOG))."
	@$(MAKE) --no-print-directory --keep-going --jobs=2 test-local test-cluster-beside

# Most of their time is waiting, for batch systems and for workers; beside the others they cost next to nothing.
test-cluster-beside:
	@mkdir -p $(dir $(CLUSTER_LOG))
	@$(MAKE) --no-print-directory test-cluster >$(CLUSTER_LOG) 2>&1; status=$$?; cat $(CLUSTER_LOG); exit $$status

test-local: $(STAMP)test ## Run the tests that need no cluster, and the examples in the documentation
	$(BIN)/python -m pytest tests --ignore=tests/cluster --durations=10
	$(BIN)/python -m pytest --doctest-modules src/ctxflow --ignore=src/ctxflow/examples

# Where neither this machine nor Docker can hold a testbed, pytest says in one line what is skipped and why.
test-cluster: $(STAMP)test ## Run the tests that need the testbed: root on Linux, or Docker (see docs/testbed.md)
	@if ! testbed/up --check 2>/dev/null && docker info >/dev/null 2>&1; then \
		echo "The testbed cannot be built here: running the cluster tests in a container."; \
		$(IN_CONTAINER); \
	else \
		$(BIN)/python $(CLUSTER_TESTS); \
	fi

test-cluster-docker: ## Run the cluster tests in a container
	$(IN_CONTAINER)

clean: ## Remove what was installed and made
	rm -rf $(VENV) build dist runs runinfo .demo
