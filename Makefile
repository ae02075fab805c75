# needle: build, train, test. `make` alone prints this help.
#
#   make train ARGS="--steps 100"            needs python3, a C compiler and make; sets up the rest
#   make test PYTHON=/opt/py/bin/python VENV=   uses that interpreter as it is: installs only what it
#                                            lacks, so that nothing is fetched when it lacks nothing

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
CC ?= cc
# The kernel tests, which `make memcheck` runs under compute-sanitizer, with TOOL=racecheck or synccheck
# too. racecheck takes minutes a test: parts by ARGS="-k ..."; it must see cuBLASLt's kernels as well,
# which fault where --kernel-name leaves them out. No backtrace of the host: it keeps Python's frames
# alive, and with them every array in them. API errors are not counted, because tests ask for memory
# that cannot be had.
MEMCHECK_TESTS ?= tests/csrc/test_ops.py tests/csrc/test_large.py tests/ops/test_attention.py \
    tests/ops/test_dilated.py tests/ops/test_layer.py tests/test_generate.py \
    tests/csrc/test_async_copy.py tests/data/test_prefetch.py
TOOL ?= memcheck
# `make asan` runs those that call the core most: every case of needle.testing among them.
ASAN_TESTS ?= tests/csrc tests/ops/test_layer.py tests/ops/test_fp8.py tests/ops/test_indexing.py \
    tests/data/test_prefetch.py tests/kernels/test_signature.py
SANITIZER ?= $(firstword $(wildcard $(CUDA_HOME)/bin/compute-sanitizer \
    /usr/local/cuda/bin/compute-sanitizer) compute-sanitizer)
RUFF := ruff==0.14.*
FORMAT := clang-format==14.0.6

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
STATE := build/state/$(shell printf '%s' '$(PYTHON)' | cksum | cut -d' ' -f1)
else
PY := $(VENV)/bin/python
STATE := $(VENV)/.needle
endif

# Without NEEDS nothing works; without LIKES something is slower or missing, and says so itself. Where a
# package is called otherwise than its module, it stands behind a colon.
BUILD_NEEDS := setuptools numpy
BUILD_LIKES := scipy_openblas32
TRAIN_LIKES := tokenizers tqdm matplotlib backports.zstd
TEST_NEEDS := $(TRAIN_LIKES) safetensors pytest xdist:pytest-xdist hypothesis
TEST_LIKES := aiohttp msgspec markdown
C_FILES = $(wildcard csrc/*.[ch] csrc/*/*.[ch] cuda/*.cpp cuda/*.cu cuda/*.cuh)

export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help train test test-all gpu test-cuda lib check format arm64 asan fuzz memcheck soak bench docs tutorials clean
.DELETE_ON_ERROR:

help:
	@echo 'make train [ARGS="--help"]  set up, build, train on text that is already here'
	@echo 'make test                   set up, build, run the tests (ARGS: of pytest)'
	@echo 'make test-all               and those that kill, emulate kernels, damage files'
	@echo 'make test-cuda              the tests that need an NVIDIA GPU; fails without'
	@echo 'make lib                    build needle/_C and, where CUDA is, _cuda.so, here'
	@echo 'make check                  formatting, lint, and the tests of the tree'
	@echo 'make format                 apply the formatting'
	@echo 'make arm64                  the core cross-compiled, its C test under qemu-user'
	@echo 'make asan                   the core under the address and UB sanitizers'
	@echo 'make fuzz                   an hour of random calls under the same sanitizers'
	@echo 'make memcheck               the CUDA kernel tests under compute-sanitizer'
	@echo 'make soak                   kills and full disks: minutes of tries to lose a run'
	@echo 'make bench                  the benchmarks'
	@echo 'make docs                   the documentation site, in build/docs/site'
	@echo 'make tutorials              run tutorials whose code changed, keep outputs'
	@echo 'make clean                  remove what was built (keeps $(VENV) and runs/)'
	@echo
	@echo 'NEEDLE_CUDA=auto|1|0        build for CUDA when possible | always | never'
	@echo 'NEEDLE_CUDA_ARCHS="80 90a"  for these (default: the GPUs here, else all)'
	@echo 'PYTHON=... VENV=            use this interpreter as it is, without a .venv'

# ---- the environment -------------------------------------------------------------------------------
# One line names everything that a bare machine lacks.
define find_host
missing=; \
command -v "$(firstword $(CC))" >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 || missing=" gcc"; \
command -v "$(PYTHON)" >/dev/null 2>&1 || \
    { echo "needle: error: no $(PYTHON): apt install python3 python3-venv python3-dev$$missing" >&2; exit 1; }; \
version=$$("$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
    { echo "needle: error: needs Python 3.10 or newer, $(PYTHON) is $$version: make PYTHON=python3.12" >&2; exit 1; }; \
"$(PYTHON)" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
    || missing="$$missing python$$version-dev"; \
[ -z "$(strip $(VENV))" ] || "$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || missing="$$missing python$$version-venv"; \
[ -z "$$missing" ] || \
    { echo "needle: error: this machine lacks packages: apt install$$missing (Fedora: dnf install gcc python3-devel)" >&2; exit 1; }
endef

# $(call want,modules) and $(call like,modules) install missing modules by pip. If that fails, `want`
# ends the build; `like` installs those that can be had, and prints a line of the others.
define lacking
lacking=$$("$(PY)" -c 'import sys; from importlib.util import find_spec; \
print(*(package or module.replace("_", "-") for module, _, package in (n.partition(":") for n in sys.argv[1:]) \
if any(find_spec(name) is None for name in (module.split(".")[0], module))))' $(1)) || exit 1; \
[ -z "$$lacking" ] || echo "needle: installing $$lacking"
endef

define want
$(lacking); \
[ -z "$$lacking" ] || "$(PY)" -m pip install -q $$lacking || \
    { echo "needle: error: pip could not install $$lacking into $(PY); install them there and run make again" >&2; exit 1; }
endef

define like
$(lacking); missed=; \
[ -z "$$lacking" ] || "$(PY)" -m pip install -q --retries 1 $$lacking >>$(STATE)/pip.log 2>&1 || \
for name in $$lacking; do \
    "$(PY)" -m pip install -q --retries 1 $$name >>$(STATE)/pip.log 2>&1 || missed="$$missed $$name"; \
done; \
[ -z "$$missed" ] || echo "needle: going on without$$missed, which pip could not install ($(STATE)/pip.log says why)"
endef

$(STATE)/python:
	@$(find_host)
ifneq ($(strip $(VENV)),)
	@[ -x $(PY) ] || { echo "needle: making $(VENV)"; "$(PYTHON)" -m venv $(VENV); }
endif
	@mkdir -p $(STATE) && touch $@

$(STATE)/build: $(STATE)/python pyproject.toml
	@$(call want,$(BUILD_NEEDS))
	@$(call like,$(BUILD_LIKES))
ifeq ($(strip $(VENV)),.venv)
	@printf '#!/bin/sh\nbin=$$(dirname "$$(readlink -f "$$0")")\n%s\n' \
	    'exec "$$bin/python" "$$bin/../../checkout.py" "$$@"' >$(VENV)/bin/needle && chmod +x $(VENV)/bin/needle
endif
	@touch $@

$(STATE)/train: $(STATE)/build
	@$(call like,$(TRAIN_LIKES))
	@touch $@

$(STATE)/test: $(STATE)/build # what is imported gets compiled then
	@export PIP_COMPILE=0; $(call want,$(TEST_NEEDS))
	@export PIP_COMPILE=0; $(call like,$(TEST_LIKES))
	@touch $@

# ---- what to do ------------------------------------------------------------------------------------
lib: $(STATE)/build
	@"$(PY)" -W ignore setup.py -q build_ext --inplace

train: $(STATE)/train lib
	@"$(PY)" apps/train_pythia.py $(ARGS)

# Threads that wait by spinning, OpenBLAS' and OpenMP's, would take the processor of what is tested.
test test-all asan: export OPENBLAS_NUM_THREADS := 1
test test-all asan: export OPENBLAS_THREAD_TIMEOUT := 4
test test-all asan: export OMP_WAIT_POLICY := passive
# Memory that glibc gives back costs a page fault for each 4 KiB when it is taken again.
test test-all: export MALLOC_TRIM_THRESHOLD_ := 1073741824
test test-all: export MALLOC_MMAP_THRESHOLD_ := 1073741824
# Images set it; then each of hundreds of processes compiles needle's modules.
test test-all check asan: export PYTHONDONTWRITEBYTECODE :=
# A process for each core, each with Python's -X dev. A test that hangs ends its process, and fails.
define pytest
@"$(PY)" -X dev -W error -m pytest -q -W error --tx "$$(nproc)*popen//python=$(PY) -X dev" --dist load \
    -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true
endef

# The core is compiled while pip installs what it does not need.
define prepare
@$(MAKE) --no-print-directory -j2 $(STATE)/test lib
endef

# Every promise once, in minutes.
test:
	$(prepare)
	$(pytest) -m "not slow and not cuda and not parity" $(ARGS)

# And emulated kernels, processes that are killed, ranks, the service, damaged files.
test-all:
	$(prepare)
	$(pytest) -m "not cuda and not parity" $(ARGS)

# What runs on a GPU asks for one before it builds for minutes.
gpu: $(STATE)/python
	@"$(PY)" -c 'from building import choices; why = choices.missing_gpu(); \
	    why and choices.fail(f"these tests run on a GPU: {why}")'

# A fatal fault of the GPU ends the run (tests/conftest.py).
test-cuda: gpu $(STATE)/test
	@NEEDLE_CUDA=1 $(MAKE) --no-print-directory lib
	@NEEDLE_REQUIRE_CUDA=1 "$(PY)" -m pytest -q -m cuda $(ARGS)

# clang-format 14 and ruff, from the machine when it has them, else from the package index.
define find_tools
format=$$(command -v clang-format-14 || command -v clang-format || echo none); \
"$$format" --version 2>/dev/null | grep -q 'version 14\.' || format=build/check/bin/clang-format; \
lint=$$(command -v ruff || echo build/check/bin/ruff); \
if [ ! -x build/check/bin/ruff ] && case "$$format $$lint" in *build/check*) true;; *) false;; esac; then \
    "$(PY)" -m venv build/check && build/check/bin/pip install -q '$(FORMAT)' '$(RUFF)' || \
        { echo "needle: error: put clang-format 14 and ruff on the PATH" >&2; exit 1; }; \
fi
endef

check: $(STATE)/test lib
	@$(find_tools); \
	"$$format" --dry-run -Werror $(C_FILES) && "$$lint" check --quiet . && "$$lint" format --quiet --check . || \
	    { echo "needle: error: see above; make format mends what can be mended by itself" >&2; exit 1; }
	@"$(PY)" -m pytest -q tests/lint/test_architecture.py tests/lint/test_floors.py tests/lint/test_every_op.py

format: $(STATE)/build
	@$(find_tools); \
	"$$format" -i $(C_FILES); "$$lint" check --quiet --fix-only .; "$$lint" format --quiet .

# The core built with the sanitizers, and its built-in matrix product, so that every byte of a product
# goes through them, and a command of Python's that runs there. One thread, because scratch is then as
# small as the one thread needs; a test of its own takes more threads. Python never frees all that it
# has: leaks are the tests' own matter.
# Of what is freed 32 MiB are kept apart, and 8 frames of each block's origin: by default 256 and 30,
# at twice the system's time.
asan_sizes := quarantine_size_mb=32:malloc_context_size=8
define sanitized
@NEEDLE_CUDA=0 NEEDLE_BLAS=builtin NEEDLE_MARCH=none "$(PY)" -W ignore setup.py -q \
    build --build-lib build/asan --build-temp build/asan/objects
@python=$$("$(PY)" -c 'import sys; print(sys.executable)'); cd build/asan && PYTHONPATH="$$PWD" \
    LD_PRELOAD="$$(echo $$(ldd needle/_C*.so | sed -n 's/.*=> \(.*san\.so[^ ]*\).*/\1/p') libstdc++.so.6)" \
    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:max_malloc_fill_size=1073741824:malloc_fill_byte=255:$(asan_sizes) \
    UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc OMP_NUM_THREADS=1 \
    NEEDLE_CPU_PRODUCTS=blas "$$python"
endef
asan fuzz: export LDFLAGS := -fsanitize=address,undefined
# Compiling takes half the time where functions that are called once are not inlined, and where a
# function of more than 300 accesses to memory calls the checks rather than contains them.
asan fuzz: export CFLAGS := -O2 -g1 -fno-omit-frame-pointer -fno-inline-functions-called-once \
    --param=asan-instrumentation-with-call-threshold=300 -fno-sanitize-recover=all -fsanitize=address,undefined

# The tests that replay the cases of needle.testing and those of views and modules.
asan: $(STATE)/test
	$(sanitized) -m pytest -q --capture=sys -m 'not cuda and not parity' -p no:cacheprovider \
	    $(addprefix $(CURDIR)/,$(ASAN_TESTS)) $(ARGS)

# `--hypothesis-seed=N` in ARGS repeats a run.
fuzz: export NEEDLE_TEST_EXAMPLES ?= 5000
fuzz: $(STATE)/test
	$(sanitized) -m pytest -q --capture=sys -p no:cacheprovider $(CURDIR)/tests/test_fuzz.py $(ARGS)

ARM := aarch64-linux-gnu-gcc
ARM_OBJECTS = $(patsubst %.c,build/arm64/objects/%.o,$(wildcard csrc/*.c csrc/cpu/*.c))
arm64: $(STATE)/build
	@for tool in $(ARM) qemu-aarch64; do command -v $$tool >/dev/null || { echo "needle: error: no $$tool:" \
	    "apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user" >&2; exit 1; }; done
	@CC=$(ARM) NEEDLE_CUDA=0 NEEDLE_BLAS=builtin NEEDLE_MARCH=none NEEDLE_WERROR=1 "$(PY)" -W ignore \
	    setup.py -q build_ext --build-lib build/arm64 --build-temp build/arm64/objects
	@$(ARM) -std=gnu17 -O1 -Wall -Wextra -Werror -fopenmp tests/csrc/cpu_ops.c $(ARM_OBJECTS) -lm \
	    -o build/arm64/cpu_ops
	@qemu-aarch64 -L /usr/aarch64-linux-gnu build/arm64/cpu_ops

memcheck: gpu $(STATE)/test
	@NEEDLE_CUDA=1 $(MAKE) --no-print-directory lib
	@command -v $(SANITIZER) >/dev/null || { echo "needle: error: no compute-sanitizer: it comes with the CUDA toolkit (SANITIZER=/path)" >&2; exit 1; }
	@NEEDLE_REQUIRE_CUDA=1 $(SANITIZER) --tool $(TOOL) --error-exitcode 1 \
	    --report-api-errors no --show-backtrace device \
	    "$(PY)" -m pytest -q -m cuda -p no:cacheprovider $(MEMCHECK_TESTS) $(ARGS)

soak: $(STATE)/test lib
	@"$(PY)" tests/soak.py $(ARGS)

bench: $(STATE)/train lib
	@for script in $$(grep -l __main__ benchmarks/*.py); do "$(PY)" $$script $(ARGS) || exit 1; done

# The README is the site's front page, where links are relative to docs/.
docs:
	@[ -x build/docs/venv/bin/mkdocs ] || { "$(PYTHON)" -m venv build/docs/venv && \
	    build/docs/venv/bin/pip install -q mkdocs-material 'mkdocstrings[python]' mkdocs-jupyter; }
	@rm -rf build/docs/source && "$(PYTHON)" building/reference.py build/docs/source
	@rm -rf build/docs/pages && cp -r docs build/docs/pages && for page in *.md; do \
	    sed 's#(docs/#(#g' $$page >build/docs/pages/$$page; done && cd build/docs/pages && mv README.md index.md
	@build/docs/venv/bin/mkdocs build --quiet --strict && echo "needle: build/docs/site/index.html"

tutorials: $(STATE)/train lib
	@$(call want,nbclient ipykernel nbformat)
	@"$(PY)" building/tutorials.py

clean:
	rm -rf build dist *.egg-info needle/*.so needle/*.so.part needle/*.pyi needle/autograd/*.pyi needle/ops/*.pyi
	find . -path ./$(or $(VENV),.venv) -prune -o -name __pycache__ -exec rm -rf {} +
