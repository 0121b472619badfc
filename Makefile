# The two commands of the README. Each makes its own virtual environment: nothing has to be installed first but
# Python 3.10 or newer with venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-

# Tests run side by side (-n) and in random order: the seed that pytest prints repeats an order, with SEED=NUMBER.
PYTEST := -m pytest --durations=10 $(if $(SEED),-p randomly --randomly-seed=$(SEED))
LOCAL_TESTS := $(PYTEST) -n auto --dist worksteal --doctest-modules tests src/ctxflow \
	--ignore=tests/cluster --ignore=src/ctxflow/examples
CLUSTER_TESTS := $(PYTEST) tests/cluster
TESTBEDS ?= 3
IN_CONTAINER := docker build -t ctxflow-testbed --build-arg UP_OPTIONS=--with-torch -f testbed/Dockerfile . && \
	docker run --rm --init --privileged --tmpfs /run:exec ctxflow-testbed /opt/ctxflow/bin/python $(CLUSTER_TESTS)

.PHONY: demo test test-quick test-local test-cluster test-cluster-docker lint clean help

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

# Lint and the tests that need the testbed, which mostly wait, run beside the others. What they print follows.
test: $(STAMP)test ## Check, and run all tests that can run here
	@mkdir -p build
	@$(MAKE) --no-print-directory lint >build/lint.log 2>&1 & lint=$$!; \
	$(MAKE) --no-print-directory test-cluster >build/test-cluster.log 2>&1 & cluster=$$!; \
	echo "Lint and the cluster tests run beside these; what they print follows."; \
	$(BIN)/python $(LOCAL_TESTS); local=$$?; \
	wait $$lint; lint=$$?; cat build/lint.log; \
	wait $$cluster; cluster=$$?; cat build/test-cluster.log; \
	[ $$lint = 0 ] || echo "make lint failed: see above"; \
	[ $$local = 0 ] || echo "make test-local failed: see the summary above that of the cluster tests"; \
	[ $$cluster = 0 ]; [ $$lint$$local$$cluster = 000 ]

test-quick: $(STAMP)test ## Run the tests that need neither a model nor a cluster, in two minutes
	$(BIN)/python $(LOCAL_TESTS) -m "not model"

test-local: $(STAMP)test ## Run the tests that need no cluster, and the examples in the documentation
	$(BIN)/python $(LOCAL_TESTS)

# Where neither this machine nor Docker can hold a testbed, pytest says in one line what is skipped and why.
test-cluster: $(STAMP)test ## Run the tests that need the testbed: root on Linux, or Docker (see docs/testbed.md)
	@if testbed/up --root-only --with-torch; then \
		$(BIN)/python $(CLUSTER_TESTS) -n $(TESTBEDS) --dist worksteal; \
	elif ! testbed/up --check 2>/dev/null && docker info >/dev/null 2>&1; then \
		echo "The testbed cannot be built here: running the cluster tests in a container."; \
		$(IN_CONTAINER); \
	else \
		$(BIN)/python $(CLUSTER_TESTS); \
	fi

test-cluster-docker: ## Run the cluster tests in a container
	$(IN_CONTAINER)

clean: ## Remove what was installed and made
	rm -rf $(VENV) build dist runs runinfo .demo
