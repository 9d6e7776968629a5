# `make train` and `make test` set everything up themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train train-hsdp train-pipeline test test-slow test-runs test-newest soak lint format compare \
  ablations allocation figures bench bench-growth bench-network clean

# Reinstalls when the requirements or the package metadata change.
$(VENV)/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade -r requirements.txt
	touch $@

train: $(VENV)/installed
	$(BIN)/python experiments/train_gpt2.py --config=configs/gpt2_tiny.py

# The same model on 4 pipeline stages of 2 replicas; compiles for a minute.
train-pipeline: $(VENV)/installed
	$(BIN)/python experiments/train_gpt2.py --config=configs/gpt2_tiny_pipeline.py

# The same model on 2 replicas of 4 shards.
train-hsdp: $(VENV)/installed
	$(BIN)/python experiments/train_gpt2.py --config=configs/gpt2_tiny_hsdp.py

# The tests of every day; some minutes. Continuous integration runs the slow ones
# below, too.
RUNS := tests/runs
PYTEST := $(BIN)/python -m pytest

test: $(VENV)/installed
	$(PYTEST) -n 2 --dist loadscope --ignore=$(RUNS) -m "not slow"

# Whole programs on meshes, the pages and the examples.
test-slow: $(VENV)/installed
	$(PYTEST) -n 2 --dist loadscope --ignore=$(RUNS) -m slow

# Whole runs, in one process and in several, some of which are killed.
test-runs: $(VENV)/installed
	$(PYTEST) $(RUNS)

# Runs TARGETS on Debian's newest Python with the newest JAX, in a separate
# system root. Needs Linux, root and debootstrap.
TARGETS ?= test
test-newest:
	tests/newest.sh $(TARGETS)

# Kills runs twenty times each and compares the results; takes half an hour.
soak: $(VENV)/installed
	$(BIN)/python tests/helpers/soak.py

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Studies with three seeds each; they take hours. The same target resumes an
# interrupted study. Pages, pictures and records are in docs/.
COMPARE := $(BIN)/python experiments/compare.py --study=configs/studies

compare: $(VENV)/installed
	$(COMPARE)/methods.py

ablations: $(VENV)/installed
	$(COMPARE)/ablations.py
	$(COMPARE)/alignment.py

# docs/allocation.md was made by an earlier version and is kept.
allocation: $(VENV)/installed
	$(COMPARE)/allocation.py --output=docs/allocation_again.md

# Figures of the method, docs/figures.md, from three runs; resumes if it was
# interrupted.
figures: $(VENV)/installed
	$(BIN)/python -m experiments.figures

# Step times on virtual hosts with slow links, compared with PyTorch. Needs
# Linux, root and iproute2; takes half an hour. Page: docs/network.md.
bench-network: $(VENV)/installed
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/python -m experiments.network --config=configs/gpt2_10m.py

# Time and memory of the reducers, compared with forward and backward.
bench: $(VENV)/installed
	$(BIN)/python -m experiments.benchmarks.reducer --config=configs/gpt2_tiny.py

# Cost of the reducers by model size: docs/growth.md. Takes some minutes.
bench-growth: $(VENV)/installed
	$(BIN)/python -m experiments.benchmarks.growth

clean:
	rm -rf $(VENV) .newest
