# Two commands to start with: `make demo` and `make test`. TORCH picks the build that is installed
# (the default is the version the tests run with; a CUDA or ROCm build works as well).
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: install demo test test-slow lint types clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[test]"
	touch $@

# Trains, then compares balancing off, on and forced for the trained model.
demo: install
	@export EQUIPOISE_ACCELERATOR=$${EQUIPOISE_ACCELERATOR:-cpu}; \
	run=runs/demo; n=1; while [ -e $$run ]; do n=$$((n + 1)); run=runs/demo-$$n; done; \
	$(BIN)/equipoise train demo --nproc-per-node 2 --out $$run && \
	$(BIN)/equipoise bench balance $$run --nproc-per-node 2 --workloads natural,hot_rank

# Two files at a time: many tests wait for processes of their own.
test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: install
	$(BIN)/python -m pytest -m slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
