# The two commands of the README. Each makes its own virtual environment: nothing has to be installed first but
# Python 3.10 or newer with venv.

PYTHON ?= python3
# What is installed: `locked`, which requirements/ says to the byte, or the `newest` or `lowest` that setup.cfg allows.
DEPS := locked
# Where PyTorch comes from; https://download.pytorch.org/whl/cpu has the build for CPUs, 2.2 GB in place of 5.9 in all.
TORCH_INDEX :=
VENV := .venv$(patsubst %,-%,$(filter-out locked,$(DEPS)))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-
INSTALL := $(BIN)/python requirements/install.py

# Tests run side by side (-n) and in random order: the seed that pytest prints repeats an order, with SEED=NUMBER.
PYTEST := -m pytest --durations=10 $(if $(SEED),-p randomly --randomly-seed=$(SEED))
LOCAL_TESTS := $(PYTEST) -n auto --dist worksteal --doctest-modules tests papers src/ctxflow \
	--ignore=tests/cluster --ignore=tests/engines --ignore=src/ctxflow/examples
CLUSTER_TESTS := $(PYTEST) tests/cluster
ENGINE_TESTS := $(PYTEST) tests/engines
TESTBEDS ?= 3
IN_CONTAINER := docker build -t ctxflow-testbed --build-arg UP_OPTIONS=--with-torch -f testbed/Dockerfile . && \
	docker run --rm --init --privileged --tmpfs /run:exec ctxflow-testbed /opt/ctxflow/bin/python $(CLUSTER_TESTS)

.PHONY: same-python demo lock test test-quick test-local test-engines test-cluster test-cluster-docker lint clean help

help: ## Show what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "ctxflow needs Python 3.10 or newer: set PYTHON=python3.X"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "install venv first (Debian: apt-get install python3-venv)"; exit 1; }

# Where a Python is named, it is that one, not the one of an environment that is there already.
same-python: $(BIN)/python
ifneq ($(origin PYTHON),file)
	@$(BIN)/python -c 'import sys; sys.exit(sys.argv[1] != sys.version)' "$$($(PYTHON) -c 'import sys; print(sys.version)')" || \
		{ echo "$(VENV) is of another Python than $(PYTHON): add VENV=.venv-NAME for one beside it"; exit 1; }
endif

# All but PyTorch, which the tests without models do without.
$(STAMP)example-packages: $(BIN)/python setup.cfg pyproject.toml requirements/torch.txt | same-python
	@$(INSTALL) example $(DEPS)
	@touch $@

$(STAMP)quick: $(STAMP)example-packages papers/pyproject.toml
	@$(INSTALL) tests $(DEPS)
	@touch $@

$(STAMP)torch: $(STAMP)example-packages
	@$(INSTALL) torch $(DEPS) $(TORCH_INDEX)
	@touch $@

$(STAMP)example: $(STAMP)example-packages $(STAMP)torch
	@touch $@

$(STAMP)test: $(STAMP)quick $(STAMP)torch
	@touch $@

lock: ## Write anew what is installed on each Python (after a change of setup.cfg's requirements)
	@$(PYTHON) -m venv build/uv && build/uv/bin/pip install --quiet --disable-pip-version-check uv
	@build/uv/bin/python requirements/lock.py

demo: $(STAMP)example ## Run the main example on this machine, with evictions
	@$(BIN)/ctxflow demo

lint: $(STAMP)quick ## Check style, types, the direction of imports, and names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/lint-imports --config papers/pyproject.toml
	$(BIN)/python lint/house.py

# Beside the local tests run lint, and the cluster tests and after them those of real engines, whose environment is built
# meanwhile: starts of engines beside clusters would wait for minutes. All but the cluster tests are nice, so that these,
# which wait for clusters, need not wait for a core too; and of the local tests no more run at once than there are cores.
# What they print follows, and what failed of all. A pipe forgets the status of its first part: it is written down.
test: $(STAMP)test ## Check, and run all tests that can run here
	@mkdir -p build
	@nice -n 5 $(MAKE) --no-print-directory lint >build/lint.log 2>&1 & lint=$$!; \
	nice -n 5 $(BIN)/python requirements/vllm_environment.py >build/vllm-environment.log 2>&1 & \
	{ $(MAKE) --no-print-directory test-cluster >build/test-cluster.log 2>&1; cluster=$$?; \
	nice -n 5 $(MAKE) --no-print-directory test-engines >build/test-engines.log 2>&1 && [ $$cluster = 0 ]; } & beside=$$!; \
	echo "Lint, and the cluster tests and those of real engines, run beside these; what they print follows."; \
	{ nice -n 5 $(BIN)/python $(LOCAL_TESTS) -n logical 2>&1; echo $$? >build/status; } | tee build/test-local.log; local=$$(cat build/status); \
	wait $$lint; lint=$$?; cat build/lint.log; \
	wait $$beside; beside=$$?; cat build/test-cluster.log build/test-engines.log; \
	[ $$lint = 0 ] || echo "FAILED lint: see build/lint.log"; \
	[ $$local$$beside = 00 ] || \
		grep -hE "^(FAILED|ERROR) " build/test-local.log build/test-cluster.log build/test-engines.log; \
	[ $$lint$$local$$beside = 000 ]

test-quick: $(STAMP)quick ## Run the tests that need neither a model nor a cluster, nor more than a second of a core
	$(BIN)/python $(LOCAL_TESTS) -m "not model and not long"

test-local: $(STAMP)test ## Run the tests that need no cluster, and the examples in the documentation
	$(BIN)/python $(LOCAL_TESTS)

# Where the environment with vLLM cannot be built, pytest says in one line what is skipped and why.
test-engines: $(STAMP)test ## Run the tests that need a real vLLM, which is built first (2.2 GB, kept outside the checkout)
	$(BIN)/python $(ENGINE_TESTS)

# Where neither this machine nor Docker can hold a testbed, pytest says in one line what is skipped and why.
test-cluster: $(STAMP)test ## Run the tests that need the testbed: root on Linux, or Docker (see docs/testbed.md)
	@if testbed/up --root-only --with-torch; then \
		$(BIN)/python $(CLUSTER_TESTS) -n $(TESTBEDS) --dist loadgroup; \
	elif ! testbed/up --check 2>/dev/null && docker info >/dev/null 2>&1; then \
		echo "The testbed cannot be built here: running the cluster tests in a container."; \
		$(IN_CONTAINER); \
	else \
		$(BIN)/python $(CLUSTER_TESTS); \
	fi

test-cluster-docker: ## Run the cluster tests in a container
	$(IN_CONTAINER)

clean: ## Remove what was installed and made
	rm -rf .venv .venv-newest .venv-lowest build dist runs runinfo .demo
