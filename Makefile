# Two commands: `make train` and `make test`. Each makes the environment it needs in .venv; `make docs` makes its own.
# `make train` installs what training needs, and `make test` adds what only tests need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DOCS_VENV := .venv-docs
FRAMEWORKS_VENV := .venv-frameworks
# the versions of what is installed
CONSTRAINTS := constraints.txt
NPROC ?= 2
DATA ?=
ARGS ?=

# without bytecode on disk each process compiles the package again, which takes a second
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test types tests test-all test-python test-torch test-browser test-frameworks wander mutants soak bench docs docs-serve clean

train: $(VENV)/.made
	@OMP_NUM_THREADS=1 $(BIN)/python -m tools.launch --standalone --nproc-per-node=$(NPROC) examples/train.py $(if $(DATA),"$(DATA)") $(ARGS)

# how long every test takes is in runs/tests.xml: `.venv/bin/python -m tools.durations runs/tests.xml` shows the slowest files
test: $(VENV)/.made-for-tests
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory --jobs=2 types tests

types: $(VENV)/.made-for-tests
	$(BIN)/mypy

tests: $(VENV)/.made-for-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --junitxml=runs/tests.xml $(ARGS)

# the same with every training pattern in every simulated world, and over gloo with three processes as well
test-all: export FSDP_TESTS = all
test-all: test

# the tests on other Pythons, each in an environment of its own: make test-python PYTHONS="python3.12 /usr/bin/python3.13"
PYTHONS ?= python3.12 python3.13
test-python:
	@for python in $(PYTHONS); do \
	  environment=.venv-$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])') && \
	  $(MAKE) --no-print-directory tests PYTHON=$$python VENV=$$environment || exit 1; \
	done

# the tests on another torch, in an environment of its own: make test-torch TORCH=2.15.0
test-torch: TORCH_VENV = .venv-torch-$(TORCH)
test-torch:
	@test -n "$(TORCH)" || { echo "Say on which torch, as in: make test-torch TORCH=2.15.0" >&2; exit 1; }
	@mkdir -p $(TORCH_VENV)
	@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(TORCH_VENV)/constraints.txt
	@$(MAKE) --no-print-directory tests VENV=$(TORCH_VENV) CONSTRAINTS=$(TORCH_VENV)/constraints.txt

# training frameworks on this engine, in an environment that has them; `make test` needs none of them
test-frameworks: $(FRAMEWORKS_VENV)/.made
	OMP_NUM_THREADS=1 $(FRAMEWORKS_VENV)/bin/python -m pytest --noconftest tests/compat/frameworks $(ARGS)

# the properties again, wandering freely for as long as asked: make wander ARGS="--hypothesis-seed=1"
wander: $(VENV)/.made-for-tests
	HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest tests -k property $(ARGS)

# deletes or redirects every row of every table and reports which of the changes some test notices
mutants: $(VENV)/.made-for-tests
	$(BIN)/python -m tools.mutate_tables

# random programs and random faults for as long as asked: make soak SOAK_SECONDS=1800 ARGS="--programs 20000"
SOAK_SECONDS ?= 60
soak: $(VENV)/.made-for-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.soak --seconds $(SOAK_SECONDS) $(ARGS)

# uses a report in a headless Chromium; needs Debian's chromium and chromium-driver
test-browser: $(VENV)/.made-for-tests
	@$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --no-build-isolation --editable '.[browser]'
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.report_in_browser $(ARGS)

# measures everything, on a machine that should be idle, and writes docs/development/benchmarks.md
bench: $(VENV)/.made-for-tests
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/step.py --model gpt8x256 --option plain --ranks 2 --out benchmarks/results/doors.json \
	  --contenders bare ddp fsdp1_orig fsdp2 ours ours_no_shard door_ddp door_fsdp1 door_fsdp2
	$(BIN)/python benchmarks/host.py
	! command -v valgrind || $(BIN)/python benchmarks/instructions.py
	$(BIN)/python benchmarks/wire.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/tracing.py
	$(BIN)/python benchmarks/uneven.py
	$(BIN)/python benchmarks/dimensions.py
	! command -v ip tc unshare nsenter || $(BIN)/python benchmarks/hosts.py
	! command -v g++ || $(BIN)/python benchmarks/offload.py
	$(BIN)/python benchmarks/where.py
	$(BIN)/python benchmarks/advice.py
	$(BIN)/python benchmarks/step_profile.py
	$(BIN)/python benchmarks/report.py
	! $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || $(BIN)/python benchmarks/gpu.py

# builds the documentation into site/; every warning is an error
docs: $(DOCS_VENV)/.made
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --clean

# serves the documentation at http://127.0.0.1:8000 and builds it again when a page changes
docs-serve: $(DOCS_VENV)/.made
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs serve

$(VENV)/.made: pyproject.toml constraints.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "fsdp needs Python 3.11 or later, and $(PYTHON) is older; name another, as in: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing torch, numpy, matplotlib, tqdm and this folder into $(VENV). Downloads once: 0.2 GB, or 3 GB with torch for CUDA."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) torch setuptools wheel
	@$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --no-build-isolation --editable '.[examples]'
	@touch $@

$(VENV)/.made-for-tests: $(VENV)/.made
	@echo "Installing what only tests and benchmarks need into $(VENV): pytest, hypothesis, mypy, ruff, safetensors, fairscale."
	@$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --no-build-isolation --editable '.[bench,examples,test,fairscale]'
	@touch $@

# The sources are read for the API reference, not imported, so this environment holds the `docs` extra and neither torch nor fsdp.
$(DOCS_VENV)/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" > $(DOCS_VENV)/requirements.txt
	$(DOCS_VENV)/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) --requirement $(DOCS_VENV)/requirements.txt
	touch $@

$(FRAMEWORKS_VENV)/.made: pyproject.toml constraints.txt setup.py
	@echo "Installing torch, Lightning, Accelerate, transformers, TRL, peft, Ray, pytest and this folder into $(FRAMEWORKS_VENV): 2 GB."
	@$(PYTHON) -m venv $(FRAMEWORKS_VENV)
	@$(FRAMEWORKS_VENV)/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) torch setuptools wheel
	@$(FRAMEWORKS_VENV)/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) --no-build-isolation --editable '.[lightning,accelerate]' datasets peft trl 'ray[train]' pytest pytest-timeout
	@touch $@

clean:
	rm -rf $(VENV) $(DOCS_VENV) $(FRAMEWORKS_VENV) .venv-3.* .venv-torch-* site runs .mypy_cache .pytest_cache .ruff_cache
