# One file to start from: `make demo` shows the program at work, `make test` proves it. Both set up what they need.
#
#   make demo          virtual environment, torch, the package; then the demo model on one prompt
#   make test          the same plus the test tools; then every test
#   make check         format, lint, types, floors, unit and fault tests
#   make sanitize      the kernels alone, in every shape, under the compiler's race and memory detectors (some minutes)
#   make test-neon     the kernels for 64-bit ARM, cross-compiled and run under qemu-aarch64: the bits of this machine's
#   make check-large   a 10.4 GB model inside 4 GiB (needs the right to make a memory cgroup)
#   make bench         prefill and decode rates of the demo model, as JSON
#   make bench-cpu     the README's table: expertide and llama.cpp in turns on the large file (PEER_PYTHON names a Python
#                      with llama-cpp-python; half an hour on a machine that does nothing else)
#   make wheel         dist/expertide-*.whl
#   make setup         everything a developer needs, nothing run
#   make clean         what was built goes; the virtual environment and the large file stay
#
# TORCH names the torch requirement (`make demo TORCH=torch==2.13.0`), PYTHON the interpreter the environment is made
# from, VENV where it lies, LARGE the model file of check-large.

PYTHON ?= python3
TORCH ?= torch
VENV ?= .venv
LARGE ?= build/large/v2lite.gguf
PEER_PYTHON ?=
PROMPT ?= Tell me a story about a fox.

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# What the compiled half is made of: a change here installs the package again. Python sources are used in place.
NATIVE := pyproject.toml CMakeLists.txt $(wildcard csrc/*.* csrc/kernels/*.*)
SOURCES := src tests tools demo_model benchmarks

.DELETE_ON_ERROR:
.PHONY: demo test setup check format sanitize test-neon check-large bench bench-cpu wheel clean

# A quarter of what all 160 routed experts take (14.8 MiB); the rest is read from the file when the router asks for it.
DEMO_CACHE := 3776KiB

demo: $(VENV)/.installed
	$(BIN)/expertide run demo -p "$(PROMPT)" -n 160 --expert-cache $(DEMO_CACHE)

test: $(VENV)/.test-tools
	$(BIN)/python -m pytest

setup: $(VENV)/.test-tools

check: $(VENV)/.test-tools
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/unit tests/fault

format: $(VENV)/.test-tools
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

sanitize: $(VENV)/bin/python
	$(BIN)/python -m tests.native_programs --detector address,undefined
	$(BIN)/python -m tests.native_programs --detector thread

test-neon: $(VENV)/bin/python
	$(BIN)/python -m tests.native_programs --target aarch64

check-large: $(VENV)/.test-tools
	$(BIN)/python tools/check_large.py --model $(LARGE)

bench: $(VENV)/.installed
	@mkdir -p build
	$(BIN)/expertide bench demo --json build/bench.json

bench-cpu: $(VENV)/.installed
	$(BIN)/python benchmarks/cpu.py --model $(LARGE) $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON))

wheel: $(VENV)/.test-tools
	$(BIN)/python -m build --wheel --outdir dist .

clean:
	rm -rf dist build/bench.json build/cp* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and by itself: which build of it is wanted is the one choice that pip cannot make.
$(VENV)/.torch: | $(VENV)/bin/python
	$(PIP) "$(TORCH)"
	@touch $@

$(VENV)/.installed: $(VENV)/.torch $(NATIVE)
	$(PIP) --editable .
	@touch $@

# With the test tools comes the package itself, so the other stamp is set too.
$(VENV)/.test-tools: $(VENV)/.torch $(NATIVE)
	$(PIP) --editable ".[test]"
	@touch $(VENV)/.installed $@
