# One command from a fresh clone: `make up`. Needs Python 3.11+ and make; everything else lands in .venv and the cache.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# TORCH_BACKEND=cpu installs the CPU build of torch (smaller). Its digest differs from the pinned one: see below.
TORCH_BACKEND ?=
# uv shows its downloads to a person and is quiet in a log.
QUIET := $(shell test -t 2 || echo --quiet)
STAMP := $(VENV)/.installed-$(if $(TORCH_BACKEND),$(TORCH_BACKEND),pinned)

.PHONY: up down status logs install test test-all check format bench release older-data simulate gpu-check clean help

help: ## Show what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

up: $(STAMP) ## Start everything on this machine: make up ARGS="--detach --port 8080"
	@exec $(BIN)/penstock up $(ARGS)

down: $(STAMP) ## Stop what `make up ARGS=--detach` started
	@$(BIN)/penstock down $(ARGS)

status: $(STAMP) ## Show what runs
	@$(BIN)/penstock status $(ARGS)

logs: $(STAMP) ## Print the logs: make logs ARGS="worker -f"
	@$(BIN)/penstock logs $(ARGS)

install: $(STAMP) ## Make .venv with everything pinned by version and hash

# pip alone takes minutes for torch; uv, installed into the same .venv, takes one. Bytecode is written here, in half a
# minute: without it an engine takes 4 seconds longer to start wherever Python may not write beside the packages, as in
# a container whose user is not the one that built it.
INSTALL = VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install $(QUIET) --python $(BIN)/python --compile-bytecode
SOURCES := cli common gateway processors producers schemas
$(STAMP): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Penstock needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@test -x $(BIN)/uv || { echo "installing uv"; $(BIN)/python -m pip install --quiet --disable-pip-version-check uv; }
ifeq ($(TORCH_BACKEND),)
	@echo "installing the pinned packages (once: about 2.5 GB to fetch, 6 GB installed; TORCH_BACKEND=cpu takes less)"
	@$(INSTALL) --require-hashes --no-deps -r constraints.txt
else
	@echo "installing the pinned versions with torch for $(TORCH_BACKEND) (once; hashes cannot be checked with another build)"
	@sed -E '/^ +--hash=/d; s/ *\\$$//' constraints.txt | \
	  grep -vE '^(nvidia-(cu|nccl|nv)[a-z0-9-]*|cuda-[a-z]+|triton)(\[.*\])?==' > $(VENV)/constraints-nohash.txt
	@$(INSTALL) --torch-backend $(TORCH_BACKEND) -r $(VENV)/constraints-nohash.txt
endif
	@$(INSTALL) --no-deps --editable .
	@$(BIN)/python -m compileall -q $(SOURCES)
	@rm -f $(VENV)/.installed-* && touch $@

TEST_PROCESSES ?= 3
RUN ?=
TESTS = PYTHONPATH=tests:$$PYTHONPATH $(BIN)/python -m kit.run --processes $(TEST_PROCESSES) $(RUN)
test: $(STAMP) ## Run the tests that a change can affect, or some: make test ARGS="tests/unit -x"
	@exec $(if $(strip $(ARGS)),$(BIN)/python -m pytest $(ARGS),env $(TESTS))

test-all: $(STAMP) ## Run all tests, also contracts of which nothing changed: make test-all RUN=--budget
	@exec env $(TESTS) --all

check: $(STAMP) ## Lint, format, types, import direction, schema evolution
	@# Ruff's cache does not know that a module was moved, which changes the order of imports elsewhere.
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pyright
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pyright -p tests
	$(BIN)/lint-imports
	$(BIN)/penstock schemas check
	$(BIN)/penstock schemas asyncapi --against docs/reference/asyncapi.json
	@if command -v tsc >/dev/null; then set -x; tsc -p gateway/penstock/gateway/console; \
	  elif [ -n "$$PENSTOCK_CI" ]; then echo "tsc is missing: apt-get install node-typescript"; exit 1; \
	  else echo "tsc is missing (Debian: node-typescript): the types of the console's scripts are not checked"; fi

format: $(STAMP) ## Put the code into its form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

release: $(STAMP) ## Build wheel, images, bills of materials and checksums into dist/: make release VERSION=1.0.0 [ARGS=--no-images]
	@$(BIN)/python deploy/release.py $(VERSION) $(ARGS)

older-data: $(STAMP) ## Keep what this release writes, for tests of later ones: make older-data VERSION=1.0.0
	@PYTHONPATH=tests $(BIN)/python tests/older/make_folder.py tests/older/$(VERSION).tar.xz

BENCHMARKS ?= core_bench overhead throughput gateway slots after_kill text images fanout batches

bench: $(STAMP) ## Measure, beside floors measured in the same run: make bench BENCHMARKS=throughput
	@for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py $(ARGS) || exit 1; done

gpu-check: $(STAMP) ## Try all that needs a card on a real one, within eight minutes: docs/gpu-status.md
	@$(BIN)/python benchmarks/gpu_check.py $(ARGS)

# One cluster of real flows per seed in a made-up world: docs/simulation.md.
SEEDS ?= 200
simulate: $(STAMP) ## Simulate clusters from seeds: make simulate SEEDS=1000, SEED=7 replays one, PLANT=name plants a defect
	@PYTHONPATH=tests:$$PYTHONPATH $(BIN)/python -m simulation --seeds $(SEEDS) $(if $(SEED),--seed $(SEED)) \
	  $(if $(PLANT),--plant $(PLANT)) $(ARGS)

clean: ## Remove what was built (data and caches of the user stay)
	rm -rf $(VENV) build dist .test-logs .pytest_cache .ruff_cache .import_linter_cache .hypothesis
