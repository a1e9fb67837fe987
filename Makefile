# SPDX-License-Identifier: Apache-2.0
# `make help` lists the targets. Everything is installed into VENV; nothing else on the machine changes, except that
# missing system packages (requirements/apt.txt) are installed when this runs as root or with password-less sudo.

VENV   ?= .venv
PYTHON ?=
JOBS   ?= $(shell nproc)
ARGS   ?=
BENCH_DIR ?= build/bench

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

S       := $(VENV)/.tardis
PY      := $(abspath $(VENV))/bin/python
PIP     := $(PY) -m pip install -q
BUILD   := build/native
GPU     := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
SITE16  := .venv16-site
SOURCES := $(shell find cpp python patches CMakeLists.txt pyproject.toml -type f -not -name '*.pyc' -not -name '*.so')

# What tests and demonstrations learn from here. SGLang compiles its page hash once into TORCH_EXTENSIONS_DIR.
ENVIRONMENT = PATH="$(abspath $(VENV))/bin:$$PATH" TORCH_EXTENSIONS_DIR="$(abspath $(S))/torch-extensions" \
  TARDIS_BUILD_DIR="$(abspath $(BUILD))" TARDIS_GUEST_KERNEL="$(abspath $(S))/guest" TARDIS_SGLANG16_SITE="$(abspath $(SITE16))" TARDIS_NVCC_PATH="$$(cat $(S)/nvcc)"

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12
	@echo; echo "Options: VENV=path (default .venv), PYTHON=python3.12, ARGS='further arguments of the program'"

.PHONY: demo
demo: $(S)/product $(S)/support $(S)/nvcc ## a real SGLang server: store a prompt's KV, restart, get it back
	@$(ENVIRONMENT) $(PY) demo/run.py $(ARGS)

.PHONY: test
test: $(S)/product $(S)/support $(S)/test $(S)/sglang16 $(S)/nvcc $(S)/guest ## build and run every test
	@$(ENVIRONMENT) $(PY) -m pytest -rs $(ARGS)

.PHONY: qemu-test
qemu-test: $(S)/product $(S)/test $(S)/nvcc $(S)/guest ## only: the NVMe driver in guests, against QEMU's controller through VFIO
	@$(ENVIRONMENT) $(PY) -m pytest -rs tests/qemu $(ARGS)

.PHONY: soak
soak: $(S)/product $(S)/support $(S)/test $(S)/sglang16 $(S)/nvcc $(S)/guest ## slow campaigns: power cuts, kill -9, bit flips, sanitizers
	@$(ENVIRONMENT) bash scripts/soak $(ARGS)

.PHONY: bench
bench: $(S)/product $(S)/support $(S)/nvcc ## time to first token by where the KV comes from
	@$(ENVIRONMENT) $(PY) bench/serving_ttft.py --l3-dir $(BENCH_DIR)/l3 --out $(BENCH_DIR) \
	  $(if $(GPU),,--device cpu) $(ARGS)

.PHONY: bench-serving
bench-serving: $(S)/product $(S)/support $(S)/nvcc ## six workloads by tier: recompute, HiCache-DRAM, file, tardis
	@$(ENVIRONMENT) $(PY) bench/serving.py --l3-dir $(BENCH_DIR)/l3 --out $(BENCH_DIR) --json $(BENCH_DIR)/serving.json \
	  $(if $(GPU),,--device cpu --quick) $(ARGS)

.PHONY: wheel
wheel: ## manylinux wheels for Python 3.11 and 3.12 in dist/, tried out in a bare Debian root
	@bash scripts/make-wheels $(ARGS)

.PHONY: lint
lint: $(S)/test ## ruff and clang-format, nothing is changed
	@$(PY) -m ruff check . && $(PY) -m ruff format --check .
	@PATH="$(abspath $(VENV))/bin:$$PATH" bash scripts/format-cpp --dry-run -Werror

.PHONY: format
format: $(S)/test ## apply ruff and clang-format
	@$(PY) -m ruff check --fix . && $(PY) -m ruff format .
	@PATH="$(abspath $(VENV))/bin:$$PATH" bash scripts/format-cpp -i

.PHONY: clean
clean: ## delete what was built; the environment stays (delete .venv yourself)
	rm -rf build dist demo-output .pytest_cache .ruff_cache .hypothesis
	rm -f $(S)/product

# ---- environment: one stamp for each step, keyed on its requirement file ----------------------------------------------

$(S)/apt: requirements/apt.txt
	@bash scripts/install-apt
	@[ -x $(VENV)/bin/python ] || "$${PYTHON:-$$(bash scripts/find-python)}" -m venv $(VENV)
	@mkdir -p $(@D) && touch $@

$(S)/build: requirements/build.txt $(S)/apt
	@$(PIP) -r $<
	@touch $@

$(S)/test: requirements/test.txt $(S)/apt
	@$(PIP) -r $<
	@touch $@

# With a GPU: SGLang with everything it asks for. Without one: only what --device cpu needs.
$(S)/sglang: requirements/sglang-0.5.23.txt requirements/sglang-0.5.23-cpu.txt $(S)/apt
	@echo "Installing SGLang and torch into $(VENV) (about 6 GB; minutes)"
ifeq ($(GPU),)
	@$(PIP) -r requirements/sglang-0.5.23-cpu.txt
	@$(PIP) --no-deps -r $<
else
	@$(PIP) -r $<
endif
	@touch $@

# The other supported release, for tests: laid over the first one's dependencies by putting its folder on PYTHONPATH.
$(S)/sglang16: requirements/sglang-0.5.16.txt $(S)/sglang
	@rm -rf $(SITE16)
	@$(PIP) --no-deps --target $(SITE16) -r $<
	@touch $@

$(S)/nvcc: requirements/nvcc.txt $(S)/apt
	@bash scripts/install-nvcc $(VENV) > $@

# The kernel of the guests under QEMU. Where it is not to be had, the folder says why, and the next call tries again.
$(S)/guest: scripts/install-guest-kernel $(S)/apt
	@$(PY) $< $@
	@if [ -e $@/why-not ]; then touch -d @0 $@; else touch $@; fi

# ---- the product ---------------------------------------------------------------------------------------------------------

# Without build isolation, in a folder that stays: a second build is incremental. The C++ tests come from the same build.
$(S)/product: $(SOURCES) $(S)/build $(S)/sglang
	@echo "Building sglang-tardis"
	@$(PIP) --no-build-isolation --no-deps --force-reinstall . \
	  --config-settings=build-dir=$(BUILD) --config-settings=cmake.define.TARDIS_TESTS=ON
	@touch $@

$(S)/support: $(shell find demo/cpu_support -name '*.py' -o -name pyproject.toml) $(S)/build $(S)/sglang
	@rm -rf build/cpu_support && mkdir -p build && cp -r demo/cpu_support build/cpu_support
	@$(PIP) --no-build-isolation --no-deps --force-reinstall build/cpu_support
	@touch $@
