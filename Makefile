# Everything that people and CI do with this repository. Nothing but Python 3.11 or newer, make and
# git is assumed; the first target that needs .venv makes it. Versions: requirements.lock (Python
# packages), BUF here, the rest in pyproject.toml.

PYTHON ?= python3
# Python that `make wheelhouse` collects wheels for.
PYTHON_VERSION ?= 3.12
BUF := @bufbuild/buf@1.75.0

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUN := $(BIN)/python
RAY_READY := $(VENV)/.ray

.DEFAULT_GOAL := help
# Two more than cores, because tests of processes wait for half of their time; more than four would
# get in each other's way. A file's tests stay in one process and in their order, so that a
# server that they share is started once.
TEST_PROCESSES := $(shell n=$$(nproc 2>/dev/null || echo 2); n=$$((n + 2)); [ "$$n" -gt 4 ] && n=4; echo $$n)

.PHONY: help setup ray demo test test-slow test-gpu try-wheels check lint types imports protos-check protos words bench lock wheelhouse build stats clean

help: ## Shows this list.
	@echo 'make TARGET, where TARGET is one of:'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(READY) ## Makes .venv from requirements.lock. UV_TORCH_BACKEND=cpu takes the small CPU build of torch.

$(READY): requirements.lock pyproject.toml clients/python/pyproject.toml tools/setup_environment.py
	@$(PYTHON) tools/setup_environment.py
	@mkdir -p build && touch $@

ray: $(RAY_READY) ## Adds Ray from requirements-ray.lock to .venv (0.1 GiB to download), which `headrace ray` needs.

$(RAY_READY): requirements-ray.lock $(READY)
	@echo "ray: installing Ray and what it needs"
	@$(RUN) -m uv pip install --python $(RUN) --require-hashes --no-deps --quiet -r requirements-ray.lock
	@touch $@

demo: $(READY) ## Starts the server with the demo model and streams an answer. PROMPT="..." asks something else.
	@$(BIN)/headrace demo

test: $(READY) ## Runs the CPU suite. ARGS="..." goes to pytest.
	@echo "test: the CPU suite with $(TEST_PROCESSES) processes"
	@$(RUN) -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
		-m "not gpu and not multi_gpu and not slow" $(ARGS)

test-slow: $(RAY_READY) ## Runs what takes minutes or what a quicker test covers too, all examples. PART=2/4: a part.
	@echo "test: the slow tests$(if $(PART),, part $(PART),) with $(TEST_PROCESSES) processes"
	@THOROUGH=1 $(RUN) -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
		-m "(slow or hypothesis) and not gpu and not multi_gpu" $(if $(PART),--part $(PART)) $(ARGS)

# A kernel that hangs ends its process, and its test fails by name.
test-gpu: $(READY) ## Runs the tests for one CUDA GPU, whose kernels it compiles, with a process per core, at most 14.
	@n=$$(nproc); [ "$$n" -gt 14 ] && n=14; \
		$(RUN) -m pytest -n $$n --dist worksteal --timeout 240 --timeout-method thread \
			-m "gpu and not multi_gpu and not slow" $(ARGS)

try-wheels: $(READY) ## Installs the wheels in fresh environments and runs the demo from there; needs a package index.
	@$(RUN) -m pytest -m slow tests/house/test_installed_wheels.py $(ARGS)

check: lint words types imports protos-check ## Lint, format, words, types, import directions, protos. What CI runs.

lint: $(READY)
	@echo "check: ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "check: not formatted; run $(BIN)/ruff format"; exit 1; }

types: $(READY)
	@echo "check: mypy"
	@$(BIN)/mypy --no-error-summary

imports: $(READY)
	@echo "check: import directions"
	@mkdir -p build
	@$(BIN)/lint-imports > build/imports.log 2>&1 || { cat build/imports.log; exit 1; }

protos-check: $(READY)
	@echo "check: stubs, buf lint, buf breaking"
	@$(RUN) protos/generate.py --check
	@BUF="$(BUF)" $(RUN) tools/check_protos.py

protos: $(READY) ## Generates the committed stubs from protos/.
	@$(RUN) protos/generate.py

bench: $(READY) ## Runs the CPU benchmarks, JSON into build/. BENCH=scheduler runs one.
	@mkdir -p build
	@for name in $(or $(BENCH),$(patsubst benchmarks/bench_%.py,%,$(wildcard benchmarks/bench_*.py))); do \
		echo "bench: $$name"; \
		$(RUN) -m benchmarks.bench_$$name --json build/bench_$$name.json || exit 1; \
	done

lock: $(READY) ## Resolves requirements.lock anew from both pyproject.toml files, and what Ray adds.
	@$(RUN) -m uv pip compile pyproject.toml clients/python/pyproject.toml --extra worker --extra bench \
		--group dev --output-file requirements.lock --universal --python-version 3.11 --fork-strategy fewest \
		--generate-hashes --no-emit-index-url --no-emit-find-links --no-emit-package headrace \
		--custom-compile-command "make lock" --quiet
	@$(RUN) -m uv pip compile pyproject.toml --extra ray --constraint requirements.lock \
		$$(sed -nE 's/^([a-z0-9._-]+)==.*/--no-emit-package \1/p' requirements.lock) \
		--output-file requirements-ray.lock --universal --python-version 3.11 --fork-strategy fewest \
		--generate-hashes --no-emit-index-url --no-emit-find-links --no-emit-package headrace \
		--custom-compile-command "make lock" --quiet
	@! grep -nE '://|^-e|file:' requirements.lock requirements-ray.lock \
		|| { echo "lock: names a host or a path"; exit 1; }

build: $(READY) ## Builds the wheels of both distributions into dist/.
	@mkdir -p build
	@for folder in clients/python .; do \
		$(RUN) -m build --wheel --no-isolation --outdir dist $$folder > build/build.log 2>&1 \
			|| { cat build/build.log; exit 1; }; \
	done
	@ls -1 dist/*.whl

wheelhouse: build ## Collects wheels for a machine without a network, without torch. PYTHON_VERSION=3.12.
	@$(RUN) tools/wheelhouse.py --python-version $(PYTHON_VERSION)

words: $(READY) ## Prints retired words, docstrings that do not read alone, wide prose, full folders. ARGS=--summary counts.
	@echo "check: words"
	@$(RUN) tools/check_words.py $(ARGS)

stats: ## Prints the sizes of our functions and files.
	@$(PYTHON) tools/code_size.py

clean: ## Removes what make and the tools wrote, .venv too.
	rm -rf $(VENV) build dist wheelhouse clients/java/target clients/java/examples/target
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
