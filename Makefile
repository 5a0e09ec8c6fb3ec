# Two commands for a fresh machine: `make demo` and `make test`. Both set up what they need in .venv.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test check format clean

demo: $(STAMP)
	$(BIN)/sgl-omni demo --out hello.wav

# Unit tests in two processes of one thread each; then those that start real pipelines, one after another.
test: $(STAMP)-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit -n 2 --dist loadfile
	$(BIN)/python -m pytest tests/integration

check: $(STAMP)-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)-test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# torch first and by its exact version, so that a machine that holds a CPU build of it takes that one
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(STAMP)-test: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test,dev]"
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info
