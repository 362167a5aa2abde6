# Two commands do everything on a fresh machine: `make serve` and `make test`. Only Python 3.11+ and make are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: serve test check test-gpu bench bench-gpu clean

serve: $(VENV)/.installed
	@exec $(BIN)/emberforge serve $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(ARGS)

# What CI runs besides the tests: formatting, lint, types, and the fast tests with warnings as errors.
check: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit

# On a machine with a GPU: kernels against their references, whole models against transformers and sentence-transformers.
test-gpu: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m gpu tests/kernels tests/parity

# Each prints a table and writes it with the machine into loadtests/results/. Takes about fifteen minutes; keep the machine quiet.
bench: $(VENV)/.installed-test
	$(BIN)/python -m loadtests.cpu_engine
	$(BIN)/python -m loadtests.overhead
	$(BIN)/python -m loadtests.batching
	$(BIN)/python -m loadtests.real_model

# On a machine with a GPU and 32 GB of disk for random weights: ten minutes.
bench-gpu: $(VENV)/.installed-test
	$(BIN)/python -m loadtests.kernels.elementwise
	$(BIN)/python -m loadtests.kernels.attention
	$(BIN)/python -m loadtests.engine
	$(BIN)/python -m loadtests.shared_prefix

clean:
	rm -rf $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; name one with PYTHON=python3.12"; exit 1; }
	@echo "installing emberforge into $(VENV) (once; a minute or more)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing what the tests need"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $@
