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
.PHONY: help setup setup-seed setup-current setup-pairs setup-vllm demo demo-vllm test test-seed test-current test-vllm coverage lint format types wheel-test docs clean clean-all

help: ## show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  \033[1m%-14s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: setup-seed setup-current setup-pairs ## build both environments, .venv/seed and .venv/current, and .venv/pairs

setup-seed: ## build .venv/seed: TRL 0.27.2, Liger 0.6.5, transformers 4.57
	@$(SETUP) seed

setup-current: ## build .venv/current: TRL 1.16.0, Liger 0.8.5, transformers 5.17
	@$(SETUP) current

setup-pairs: $(addprefix setup-,$(STACKS)) ## install further pairs of TRL and Liger that the tests try
	@$(SETUP) --pairs --deepspeed $(STACKS)

setup-vllm: ## build .venv/vllm: the current stack with a real vLLM engine for the CPU (3.7 GB)
	@$(SETUP) --pairs vllm

demo: setup-seed ## train the tiny broken run and write runs/demo/report.html (options: DEMO_ARGS="--steps 20")
	@$(OFFLINE) $(SEED)/driftscope demo --out runs/demo $(DEMO_ARGS)

demo-vllm: setup-vllm ## train with a real vLLM engine, both loss paths at two values of top_p: runs/demo-vllm
	@PYTHONPATH=.venv/pairs/trl-0.27.2-liger_kernel-0.6.5 $(OFFLINE) .venv/vllm/bin/python examples/real_vllm.py

test: setup-pairs ## run the tests in both stacks (options: PYTEST_ARGS="-m 'not slow'", JOBS=1)
	@$(PYTHON) scripts/test_stacks.py --jobs $(JOBS) $(STACKS) -- $(PYTEST_ARGS)

test-seed: setup-seed ## run the tests in the seed's stack
	@$(SETUP) --pairs --deepspeed seed
	@$(PYTHON) scripts/test_stacks.py seed -- $(PYTEST_ARGS)

test-current: setup-current ## run the tests in the current stack
	@$(SETUP) --pairs --deepspeed current
	@$(PYTHON) scripts/test_stacks.py current -- $(PYTEST_ARGS)

test-vllm: setup-vllm ## run the tests that need a real vLLM engine
	@$(PYTHON) scripts/test_stacks.py vllm -- tests/vllm $(PYTEST_ARGS)

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
