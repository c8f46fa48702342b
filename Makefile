# The vocabulary of the project: make demo | test | properties | sanitize | mutants | lint | format |
# bench | accuracy | gpu-check | wheel | reproduce | requirements | audit | clean.
# Each target sets up what it needs in $(VENV), with an editable install of the package; a second call
# starts at once. Variables: PYTHON, VENV, TORCH (e.g. TORCH=torch==2.13.0), EXTRAS (without models where
# no torchvision fits the torch), NPROC, DEMO_ARGS, PYTEST_ARGS, MUTANTS_ARGS, BENCH_ARGS, BENCH_OUT, and
# those of the build (setup.py). Where TORCH_CUDA_ARCH_LIST is unset, the environment's own build is for
# this machine's GPUs, or without one for a single architecture.
# gpu-check alone uses $(PYTHON) as it is, with the torch that is there, and leaves a report in $(OUT).

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch>=2.10
EXTRAS ?= test,demo,bench,models
PINNED_TORCH ?= torch==2.14.1 torchvision==0.29.1
NPROC ?= 4
OUT ?= build/gpu-check
BENCH_OUT ?= build/bench
BENCH_ARGS ?= --device cpu --quick
ACCURACY_OUT := benchmarks/results/cpu-accuracy

BIN := $(VENV)/bin
# Asked only where it counts; nvidia-smi without a driver answers in words, which are no architecture.
GPU_ARCHS = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
  | grep -x '[0-9][0-9.]*' | sort -u)
ARCHS := $(or $(TORCH_CUDA_ARCH_LIST),$(GPU_ARCHS),8.0+PTX)
# Named after what they depend on besides files, so that a change of it is seen.
TORCH_STAMP := $(VENV)/.torch-$(firstword $(shell echo '$(TORCH)' | cksum))
PACKAGE_STAMP := $(VENV)/.package-$(firstword \
  $(shell echo '$(SYNCBN_CUDA) $(CUDA_HOME) $(ARCHS) $(EXTRAS)' | cksum))
DEV_STAMP := $(VENV)/.dev

# Each torchvision takes one torch. Left to itself, pip would fetch the newest of both.
SAME_TORCH = "torch==$$($(BIN)/python -c 'from importlib.metadata import *; print(version("torch"))')"

# The package's .py files are missing here as an editable install reads them in place.
BUILD_SOURCES := pyproject.toml setup.py $(wildcard build_support/*.py) syncbn_cuda/__init__.py \
  $(shell find csrc -type f)
CXX_SOURCES = $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu')

# The emulator and the CPU library are built with sanitizers. Python is not, so that their libraries
# have to be there before it; and what they report must not end in a capture that dies with it.
SANITIZE := -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
sanitizer = $(shell $${CXX:-g++} -print-file-name=lib$(1).so)
SANITIZED_PYTEST = SYNCBN_SANITIZE=1 SYNCBN_EMULATOR_FLAGS='$(SANITIZE)' \
  PYTHONPATH=build/sanitize/lib ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
  LD_PRELOAD='$(call sanitizer,asan) $(call sanitizer,ubsan)' $(BIN)/pytest --capture=sys

.PHONY: demo test properties sanitize mutants lint format bench accuracy gpu-check wheel reproduce \
  requirements audit clean
.DELETE_ON_ERROR:

demo: $(PACKAGE_STAMP)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m torch.distributed.run --standalone \
	  --nproc-per-node $(NPROC) examples/digits_segmentation.py $(DEMO_ARGS)

test: $(PACKAGE_STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Nightly: at least 10,000 cases, other ones each time. Which, and how many, is said at the end.
properties: $(PACKAGE_STAMP)
	OMP_NUM_THREADS=1 PROPERTY_CASES=$${PROPERTY_CASES:-500} PROPERTY_SEED=$${PROPERTY_SEED:-$$(date +%s)} \
	  $(BIN)/python -m pytest tests/test_properties.py $(PYTEST_ARGS)

sanitize: $(PACKAGE_STAMP)
	mkdir -p build
	SYNCBN_CUDA=0 CFLAGS='$(SANITIZE) -DSYNCBN_POISON' LDFLAGS='$(SANITIZE)' $(BIN)/python setup.py -q build \
	  --build-base build/sanitize --build-lib build/sanitize/lib >build/sanitize.log \
	  || { cat build/sanitize.log; exit 1; }
	$(SANITIZED_PYTEST) -k 'not schedule and not opcheck' tests/test_sanitized.py \
	  tests/test_emulator.py tests/test_emulated_host.py tests/test_operators.py
	SYNCBN_CPU_CAPABILITY=avx2 $(SANITIZED_PYTEST) -k 'not opcheck' tests/test_operators.py
	SYNCBN_CPU_CAPABILITY=default $(SANITIZED_PYTEST) -k 'not opcheck' tests/test_operators.py

mutants: $(PACKAGE_STAMP)
	$(BIN)/python tests/mutate.py $(MUTANTS_ARGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(BIN)/mypy syncbn_cuda

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

bench: $(PACKAGE_STAMP)
	$(BIN)/python -m benchmarks --out $(BENCH_OUT) $(BENCH_ARGS)

# The stored run, and what docs/numerics.md says of it.
accuracy: $(PACKAGE_STAMP)
	$(BIN)/python -m benchmarks accuracy --device cpu --out $(ACCURACY_OUT)
	$(BIN)/python -m benchmarks.accuracy_docs $(ACCURACY_OUT)/bench-cpu.json docs/numerics.md

gpu-check:
	$(PYTHON) tests/gpu_check.py '$(OUT)'

wheel: $(TORCH_STAMP)
	$(BIN)/pip wheel --no-build-isolation --no-deps --wheel-dir dist .

# The wheel twice, from two folders: it must be the same file.
reproduce: $(TORCH_STAMP)
	$(BIN)/python tests/reproduce.py

# Pins what all extras need, for every Python and platform at once; beside the newest torch that is tested.
requirements: $(BIN)/python
	$(BIN)/pip install uv
	{ echo '# All extras of pyproject.toml and the tools of the build, pinned by `make requirements`.'; \
	  printf '%s\n' $(PINNED_TORCH) 'setuptools>=77' wheel | $(BIN)/uv pip compile --quiet --universal \
	  --python-version 3.10 --all-extras --no-header --no-annotate pyproject.toml -; } >requirements-dev.txt

# Needs the network: the database of known vulnerabilities is PyPI's.
audit: $(BIN)/python
	$(BIN)/pip install pip-audit
	$(BIN)/pip-audit --disable-pip --no-deps --requirement requirements-dev.txt

# Keeps the environment, which is gigabytes; rm -r $(VENV) removes it.
clean:
	rm -rf build dist *.egg-info syncbn_cuda/*.so syncbn_cuda/_build_config.py $(VENV)/.package-* \
	  .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed, " \
	  "found " + sys.version.split()[0] + ": make PYTHON=... " )'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }  # or a half-made one would be used

$(TORCH_STAMP): | $(BIN)/python
	rm -f $(VENV)/.torch-*
	$(BIN)/pip install $(foreach spec,$(TORCH),'$(spec)') 'setuptools>=77' wheel ninja
	touch $@

$(PACKAGE_STAMP) $(DEV_STAMP): export TORCH_CUDA_ARCH_LIST := $(ARCHS)

$(PACKAGE_STAMP): $(TORCH_STAMP) $(BUILD_SOURCES)
	rm -f $(VENV)/.package-*
	@echo 'Building both libraries, for GPUs of $(ARCHS): a minute or two on two cores'
	$(BIN)/pip install --no-build-isolation --editable '.[$(EXTRAS)]' $(SAME_TORCH)
	touch $@

$(DEV_STAMP): $(PACKAGE_STAMP) pyproject.toml
	$(BIN)/pip install --no-build-isolation --editable '.[dev]' $(SAME_TORCH)
	touch $@
