# `make train` and `make test` set everything up themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train train-pipeline test test-newest test-runs soak lint format compare \
  ablations allocation figures bench bench-growth bench-network clean

# The stamp is remade when what is to be installed changes.
$(VENV)/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade -r requirements.txt
	touch $@

train: $(VENV)/installed
	$(BIN)/python experiments/train_gpt2.py --config=configs/gpt2_tiny.py

# The same model on 4 pipeline stages of 2 replicas; a minute to compile.
train-pipeline: $(VENV)/installed
	$(BIN)/python experiments/train_gpt2.py --config=configs/gpt2_tiny_pipeline.py

# Whole models and runs on meshes, in one process and in four: they compile
# for minutes.
RUNS := tests/runs

test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --dist loadscope --ignore=$(RUNS)

# The same suite on the newest Python of Debian with the newest JAX for it, in a
# system root of its own: Linux, root and debootstrap. TARGETS are run there.
TARGETS ?= test
test-newest:
	tests/newest.sh $(TARGETS)

test-runs: $(VENV)/installed
	$(BIN)/python -m pytest $(RUNS)

# Runs killed twenty times each; half an hour.
soak: $(VENV)/installed
	$(BIN)/python tests/helpers/soak.py

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Studies, three seeds each, of hours; the same target goes on where one was
# cut off. Pages, pictures and records are in docs/.
COMPARE := $(BIN)/python experiments/compare.py --study=configs/studies

compare: $(VENV)/installed
	$(COMPARE)/methods.py

ablations: $(VENV)/installed
	$(COMPARE)/ablations.py
	$(COMPARE)/alignment.py

# docs/allocation.md is from an earlier version, and stays.
allocation: $(VENV)/installed
	$(COMPARE)/allocation.py --output=docs/allocation_again.md

# The method's own figures, docs/figures.md, from three runs; goes on where it
# was cut off.
figures: $(VENV)/installed
	$(BIN)/python -m experiments.figures

# Step times on virtual hosts with slow links, beside PyTorch's: Linux, root and
# iproute2; half an hour. Page and pictures: docs/network.md.
bench-network: $(VENV)/installed
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/python -m experiments.network --config=configs/gpt2_10m.py

# Time and memory of the reducers beside forward and backward.
bench: $(VENV)/installed
	$(BIN)/python -m experiments.benchmarks.reducer --config=configs/gpt2_tiny.py

# The reducers alone, over sizes of the model: docs/growth.md; some minutes.
bench-growth: $(VENV)/installed
	$(BIN)/python -m experiments.benchmarks.growth

clean:
	rm -rf $(VENV) .newest
