# Two commands for a fresh machine: `make demo` and `make test`. Both set up what they need in .venv.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
STAMP := .venv/.installed
# A test of real processes misses its times where the machine stalls, so it is tried again; the summary lists it.
AGAIN := --reruns 2 -rR
# Tests start hundreds of processes of this package, which must not each compile it anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check format clean

demo: $(STAMP)
	$(BIN)/sgl-omni demo --out hello.wav

# Unit tests; a GPU's path by Triton's interpreter; then those that start real pipelines: two at a time, but for those marked `alone`.
test: $(STAMP)-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit -n 2 --dist loadfile
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/interpreted -n 2
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integration -n 2 --dist loadfile $(AGAIN) -m "not gpu and not alone"
	$(BIN)/python -m pytest tests/integration $(AGAIN) -m "not gpu and alone"

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
