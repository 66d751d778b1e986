# Set-up needs Python 3.11 or later and make. `make PYTHON=python3.12 demo` names another interpreter.
PYTHON ?= python3
STACKS ?= seed current
# Stacks tested side by side; 0 means two where there are two cores.
JOBS ?= 0
PYTEST_ARGS ?=
DEMO_ARGS ?=

SEED := .venv/seed/bin
SETUP := $(PYTHON) scripts/setup_env.py
OFFLINE := HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
CODE := driftscope hooks dashboards tests examples benchmarks scripts setup.py

.DEFAULT_GOAL := help
.PHONY: help setup setup-seed setup-current demo test test-seed test-current coverage lint format types wheel-test docs clean clean-all

help: ## show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  \033[1m%-14s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: setup-seed setup-current ## build both environments, .venv/seed and .venv/current

setup-seed: ## build .venv/seed: TRL 0.27.2, Liger 0.6.5, transformers 4.57
	@$(SETUP) seed

setup-current: ## build .venv/current: TRL 1.16.0, Liger 0.8.5, transformers 5.17
	@$(SETUP) current

demo: setup-seed ## train the tiny broken run and write runs/demo/report.html (options: DEMO_ARGS="--steps 20")
	@$(OFFLINE) $(SEED)/driftscope demo --out runs/demo $(DEMO_ARGS)

test: $(addprefix setup-,$(STACKS)) ## run the tests in both stacks (options: PYTEST_ARGS="-m 'not slow'", JOBS=1)
	@$(PYTHON) scripts/test_stacks.py --jobs $(JOBS) $(STACKS) -- $(PYTEST_ARGS)

test-seed: setup-seed ## run the tests in the seed's stack
	@$(PYTHON) scripts/test_stacks.py seed -- $(PYTEST_ARGS)

test-current: setup-current ## run the tests in the current stack
	@$(PYTHON) scripts/test_stacks.py current -- $(PYTEST_ARGS)

coverage: setup-seed ## run the tests in the seed's stack and report the lines they miss
	@$(PYTHON) scripts/test_stacks.py seed -- --cov --cov-report=term-missing $(PYTEST_ARGS)

lint: setup-seed ## ruff: rules and layout
	$(SEED)/ruff check $(wildcard $(CODE))
	$(SEED)/ruff format --check $(wildcard $(CODE))

format: setup-seed ## ruff: mend what can be mended
	$(SEED)/ruff check --fix $(wildcard $(CODE))
	$(SEED)/ruff format $(wildcard $(CODE))

types: setup-seed ## mypy --strict on driftscope, hooks and dashboards
	$(SEED)/mypy --strict

wheel-test: setup-seed ## build the wheel and try it outside the checkout, on the oldest dependencies allowed
	@$(SEED)/python scripts/wheel_test.py

docs: setup-seed ## check that every relative link in the pages leads somewhere
	@$(SEED)/python scripts/check_docs.py

clean: ## remove caches, builds and runs; keep the environments
	rm -rf build dist runs htmlcov .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find driftscope hooks dashboards tests examples benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean ## remove the environments too
	rm -rf .venv
