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

# How the suite is run is in tests/suite; CONTRIBUTING says what each depth covers.
SUITE := $(BIN)/python tests/run.py
# SEED repeats an order of tests, SHARD=K/N runs the K-th of N parts of about the same cost.
SEED :=
SHARD :=
TESTBEDS ?= 3
TEST := $(SUITE) test --testbeds $(TESTBEDS) $(if $(SEED),--seed $(SEED)) $(if $(SHARD),--shard $(SHARD))
N ?= 10
LOAD ?= 4
HOURS ?= 2

.PHONY: same-python demo lock test test-release test-quick test-local test-engines test-cluster test-times test-hunt \
	test-stress lint clean help

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
	@$(BIN)/python tests/suite/starts.py $(BIN)/python
	@touch $@

$(STAMP)torch: $(STAMP)example-packages
	@$(INSTALL) torch $(DEPS) $(TORCH_INDEX)
	@touch $@

$(STAMP)example: $(STAMP)example-packages $(STAMP)torch
	@touch $@

# Beside each other, since pip uses one core.
$(STAMP)test: $(STAMP)example-packages papers/pyproject.toml
	@$(MAKE) --no-print-directory --jobs=2 $(STAMP)quick $(STAMP)torch
	@touch $@

lock: ## Write anew what is installed on each Python (after a change of setup.cfg's requirements)
	@$(PYTHON) -m venv build/uv && build/uv/bin/pip install --quiet --disable-pip-version-check uv
	@build/uv/bin/python requirements/lock.py

demo: $(STAMP)example ## Run the main example on this machine, with evictions
	@$(BIN)/ctxflow demo

lint: $(STAMP)quick ## Check style, types, the direction of imports, and names
	@$(SUITE) test lint

test: $(STAMP)test ## Check, and run all tests that can run here, in about a quarter of an hour
	@$(TEST)

test-release: $(STAMP)test ## The same in depth: all seeds, hundreds of examples, long chaos, every engine under every fault
	@$(TEST) --depth release

test-quick: $(STAMP)quick ## Run the tests that need neither a model nor a cluster, nor more than a fifth of a second of a core
	@$(TEST) --depth quick local

test-local: $(STAMP)test ## Run the tests that need no cluster, and the examples in the documentation
	@$(TEST) local

# Where the environment with vLLM cannot be built, pytest says in one line what is skipped and why.
test-engines: $(STAMP)test ## Run the tests that need a real vLLM, which is built first (2.2 GB, kept outside the checkout)
	@$(TEST) engines

# Where neither this machine nor Docker can hold a testbed, pytest says in one line what is skipped and why.
test-cluster: $(STAMP)test ## Run the tests that need the testbed: root on Linux, or Docker (see docs/testbed.md)
	@$(TEST) cluster

test-times: ## Show where the time of the last run went; RECORD=1 keeps it, for SHARD and the order of tests
	@$(SUITE) times $(if $(RECORD),--record)

test-hunt: $(STAMP)test ## Look for HOURS (2) for examples that no run has drawn yet, in all ROOMS or some; goes on where it ended
	@$(SUITE) hunt --hours $(HOURS) $(if $(ROOMS),--rooms "$(ROOMS)")

test-stress: $(STAMP)test ## Run the suite N times (10) in random order beside LOAD (4) busy loops; PARTS="local" for some parts
	@$(SUITE) stress --runs $(N) --load $(LOAD) $(if $(SEED),--seed $(SEED)) $(if $(PARTS),--parts "$(PARTS)")

clean: ## Remove what was installed and made
	rm -rf .venv .venv-newest .venv-lowest build dist runs runinfo .demo
