# `make train` and `make test` set everything up themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train train-vision train-hsdp train-pipeline test test-slow test-runs \
  test-newest golden soak dist lint format protocol horizon pages docs plan-paper bench \
  bench-network bench-overlap clean

# Reinstalls when the requirements or the package metadata change.
$(VENV)/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade --upgrade-strategy eager \
	  -r requirements.txt
	touch $@

train: $(VENV)/installed
	$(BIN)/python experiments/train_gpt2.py --config=configs/gpt2_tiny.py

# Three networks for images: a transformer, a convolution, two inputs.
train-vision: $(VENV)/installed
	for task in vit conv coattention; do \
	  $(BIN)/python experiments/train_gpt2.py \
	    --config=configs/$${task}_digits.py || exit; \
	done

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

# Whole runs, in one process and in several, some of which are killed; then those
# that measure times, beside nothing else.
test-runs: $(VENV)/installed
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "not alone" $(RUNS)
	$(PYTEST) -m alone $(RUNS)

# Records the golden run again, after a method's version was raised.
golden: $(VENV)/installed
	PYTHONPATH=. $(BIN)/python tests/golden_test.py

# Runs TARGETS on Debian's newest Python with the newest JAX, in a separate
# system root. Needs Linux, root and debootstrap.
TARGETS ?= test
test-newest:
	tests/newest.sh $(TARGETS)

# Kills runs twenty times each and compares the results; takes half an hour.
soak: $(VENV)/installed
	$(BIN)/python tests/helpers/soak.py

# A source distribution and a wheel made from it, in dist/.
dist: $(VENV)/installed
	rm -rf dist
	$(BIN)/python -m build --no-isolation

# Style, and the types of the package.
lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check --python $(VENV) edgc_jax

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The protocol's study (docs/protocol.md), one run a core; it takes many hours,
# and the same target continues it. Records go to docs/records/.
STUDY := $(BIN)/python experiments/run_study.py --jobs=$(shell nproc)

protocol: $(VENV)/installed
	$(STUDY) $(foreach name,full_length table rounds low_rank overlap, \
	  --study=configs/protocol/$(name).py)

# Whether a rank that follows entropy wins in a run of 20,000 steps (docs/paper.md):
# days on two cores, hours on a GPU with --together.
horizon: $(VENV)/installed
	$(STUDY) --study=configs/paper/horizon.py

# Tables and pictures of all pages, from records: minutes.
pages: $(VENV)/installed
	$(BIN)/python -m experiments.pages

# The documentation as a site: open site/index.html. CI builds it in test-slow.
docs: $(VENV)/installed
	$(BIN)/python -m experiments.pages.site

# The paper's three models compiled for their meshes, without the devices, and
# their runs modelled: docs/paper.md. Takes some minutes, and 8 GiB.
plan-paper: $(VENV)/installed
	for size in 345m 2b5 12b; do \
	  $(BIN)/python experiments/plan_layout.py --output=docs/paper_layouts.json \
	    --config=configs/paper/gpt2_$$size.py || exit; \
	done
	$(BIN)/python -m experiments.planning.paper_clusters

# Step times on virtual hosts with slow links, compared with PyTorch. Needs
# Linux, root and iproute2; takes half an hour. Result: docs/network.json.
bench-network: $(VENV)/installed
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/python -m experiments.network --config=configs/gpt2_10m.py

# How much of an exchange of local steps runs beside inner steps. Needs the same;
# rows of the table in docs/local_steps.md.
bench-overlap: $(VENV)/installed
	$(BIN)/python -m experiments.network.overlap --config=configs/gpt2_tiny.py

# Cost of the reducers by model size: docs/growth.json. Takes some minutes.
bench: $(VENV)/installed
	$(BIN)/python -m experiments.benchmarks.cost

clean:
	rm -rf $(VENV) .newest build dist site
