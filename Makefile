# `make` lists what there is. Every target that needs an environment brings it up to date first.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules
# Tests start hundreds of programs, which must not compile their modules each time.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
ARGS ?=
JOBS ?= 2
# Tests with servers and processes wait for a third of their time: for leases, disks, processes that start.
WAITING_JOBS ?= 3
MINUTES ?= 30
PYTEST := $(BIN)/python -m pytest --durations=10 --durations-min=1

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## Build .venv from requirements/dev.txt (nothing to do: well under a second)
	@scripts/setup_venv.sh dev

.PHONY: test
test: setup system-packages $(if $(strip $(ARGS)),,lint types) ## Lint, types and tests (≤ 15 minutes); ARGS="tests/unit -k lease" runs those tests only
ifeq ($(strip $(ARGS)),)
	$(BIN)/python scripts/run_tests.py --jobs $(JOBS) --waiting-jobs $(WAITING_JOBS)
else
	$(PYTEST) $(ARGS)
endif

.PHONY: test-slow
test-slow: setup system-packages ## Tests that take longer: many kills, long waits, the widest parametrisations
	$(BIN)/python scripts/run_tests.py --suite slow --jobs $(JOBS) --waiting-jobs $(WAITING_JOBS)

.PHONY: test-pythons
test-pythons: ## The pure suites on every installed Python from 3.11 to 3.13
	@scripts/test_pythons.sh $(ARGS)

.PHONY: test-oldest
test-oldest: setup ## The data tests with the oldest pyarrow that pyproject.toml admits
	$(BIN)/python scripts/test_oldest_pyarrow.py $(ARGS)

.PHONY: soak
soak: setup ## Simulated jobs, then real runs that are killed, with new seeds until one fails (MINUTES=30 in all, JOBS=2)
	$(BIN)/python tests/simulation/run.py --minutes $$(( $(MINUTES) / 2 )) --jobs $(JOBS)
	$(BIN)/python tests/fault/soak_runs.py --minutes $$(( ( $(MINUTES) + 1 ) / 2 ))

.PHONY: lint
lint: setup ## Check style
	$(BIN)/ruff check
	$(BIN)/ruff format --check

.PHONY: types
types: setup ## Check types
	$(BIN)/mypy

.PHONY: format
format: setup ## Put the code into its format and mend what can be mended
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

.PHONY: demo
demo: ## Install what it needs (torch and pyarrow), then train, kill a worker, compare (ARGS="--kills 3" or --servers)
	@scripts/setup_venv.sh demo
	@$(BIN)/strata demo $(ARGS)

.PHONY: web
web: ## Check and build the dashboard's page into src/strata/dashboard/static (needs Node.js 20.19 or newer)
	npm --prefix web ci --no-fund --no-audit
	npm --prefix web run check

.PHONY: screenshots
screenshots: setup system-packages ## Make docs/images/*.png again, from real runs (ARGS="--only tuning")
	$(BIN)/python scripts/screenshots.py $(ARGS)

.PHONY: docs
docs: setup ## Build the documentation site into .build/site; a broken link or anchor fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict # not with --quiet: it would hide what --strict counts
	@echo "docs: .build/site/index.html"

.PHONY: proto
proto: setup ## Make src/strata/v1 from proto/
	PYTHON=$(BIN)/python scripts/generate_proto.sh

.PHONY: lock
lock: ## Resolve requirements/*.txt again, keeping versions (ARGS=--upgrade: take the newest)
	scripts/lock.sh $(ARGS)

.PHONY: bench-setup
bench-setup: setup ## Build .venv-peers*, the systems that benchmarks compare against, and fetch the public data sets
	@scripts/setup_venv.sh peers
	@scripts/setup_venv.sh peers-dashboard
	@scripts/bench_packages.sh
	@$(BIN)/python -m strata.bench.contenders.models_data

.PHONY: bench
bench: bench-setup ## Run every benchmark (ARGS=--quick)
	$(BIN)/strata bench --all $(ARGS)

.PHONY: system-packages
system-packages: ## Install what the tests need from Debian and npm
	@scripts/system_packages.sh

.PHONY: clean
clean: ## Remove caches and build output; the environments stay
	rm -rf .build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
