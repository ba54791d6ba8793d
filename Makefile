# `make demo` and `make test` need Python >= 3.11 and make, nothing else: they create their own environment in .venv.
PYTHON ?= python3
VENV ?= .venv
# The default wheel of torch includes several GB of CUDA libraries on Linux; for a CPU-only machine use
# `make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"`.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
USER_STAMP := $(VENV)/.installed-user
STAMP := $(VENV)/.installed
# One thread per process: pytest's workers and the ranks that tests fork already use all cores. A part of the time tests wait,
# the slow ones for processes, jobs and time limits: there are more workers than the two cores of a small machine. The slow
# tests begin with the longest files (LONGEST in tests/conftest.py) instead of those of most tests. Compiled modules are kept, also
# where the environment says otherwise: every worker would rewrite the assertions of all tests again, some 8 s each.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile -q

.PHONY: demo test test-all test-slow lint format docs bench gpu env clean

# Modules are compiled when they are first imported, instead of all 11,000 at installation, which took 40 of 90 seconds.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
define environment
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH)
endef

$(USER_STAMP): pyproject.toml Makefile
	$(environment)
	$(INSTALL) -e .
	touch $@

# With the test tools in one go: pip would otherwise resolve and build everything twice.
$(STAMP): pyproject.toml Makefile
	$(environment)
	$(INSTALL) -e ".[dev]"
	touch $(USER_STAMP) $@

env: $(STAMP)

demo: $(USER_STAMP)  ## train, forecast and score on a built-in data set; installs no test tools
	$(BIN)/credit-like demo

test: $(STAMP)  ## the everyday tests
	$(PYTEST) -m "not slow"

test-slow: $(STAMP)  ## the slow tests that CI runs: representatives of every layout, kills, job chains, notebooks
	$(PYTEST) -n 4 --no-loadscope-reorder -m "slow and not long"

test-all: test  ## everything: the full layout matrix, kill storms
	$(PYTEST) -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## the documentation site in build/site; warnings are errors
	$(BIN)/mkdocs build --strict

bench: $(STAMP)  ## benchmarks of a CPU on this machine; not first_picture.py, which installs the program, and trainings of hours
	for script in $(filter-out benchmarks/gpu.py benchmarks/first_picture.py benchmarks/recipes.py benchmarks/ensemble.py,$(wildcard benchmarks/*.py)); do $(BIN)/python $$script || exit 1; done

gpu: $(STAMP)  ## checks and times on one CUDA device, 10 minutes; CREDIT=PYTHON names an environment with miles-credit
	$(BIN)/python benchmarks/gpu.py $(if $(CREDIT),--credit $(CREDIT))

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
