# `make train` and `make test` set everything up themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train train-vision train-hsdp train-pipeline test test-all test-slow \
  test-core test-newest soak soak-changed golden dist lint format protocol \
  horizon pages docs plan-paper bench-network bench-overlap \
  bench-sites clean

# Installs the package with one of its extras, as $(VENV)/train does; again when
# the package metadata change.
$(VENV)/%: pyproject.toml requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade --upgrade-strategy eager -e ".[$*]"
	touch $@

train: $(VENV)/train
	$(BIN)/python experiments/train_gpt2.py --config=configs/gpt2_tiny.py

# Networks for images: a transformer, a convolution, two inputs, a diffusion model.
train-vision: $(VENV)/train
	for task in vit conv coattention diffusion; do \
	  $(BIN)/python experiments/train_gpt2.py \
	    --config=configs/$${task}_digits.py || exit; \
	done

# The same model on 4 pipeline stages of 2 replicas; compiles for a minute.
train-pipeline: $(VENV)/train
	$(BIN)/python experiments/train_gpt2.py --config=configs/gpt2_tiny_pipeline.py

# The same model on 2 replicas of 4 shards.
train-hsdp: $(VENV)/train
	$(BIN)/python experiments/train_gpt2.py --config=configs/gpt2_tiny_hsdp.py

# Workers take whole files, the longest first (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest
TWO := $(PYTEST) -n 2 --dist loadscope --no-loadscope-reorder

# The tests of every day: at most four minutes.
test: $(VENV)/dev
	$(TWO) -m "not slow and not soak"

# All but the soak tests.
test-all: test test-slow

# Whole programs on meshes, whole runs, pages and examples.
test-slow: $(VENV)/dev $(VENV)/site $(VENV)/emulators
	$(TWO) -m "slow and not soak"

# The package alone: what the newest platform has to pass.
ROOMS := wire leaves budget state mesh reducer methods stages sites
test-core: $(VENV)/dev
	$(TWO) -m "not slow and not soak" edgc_jax tests/contract_test.py \
	  tests/golden_test.py tests/wire_bytes_test.py $(ROOMS:%=tests/%)

# What takes long, or needs servers, clusters or shaped links; before a release.
# Then kills runs twenty times each, and compares the results.
soak: soak-changed
	$(BIN)/python tests/helpers/soak.py

# Of the soak tests those that cover a file which changed since the commit SINCE;
# all of them if it is empty.
SINCE ?=
soak-changed: $(VENV)/dev $(VENV)/site $(VENV)/soak
	$(TWO) --changed-since=$(SINCE) -m "soak and not alone"
	$(PYTEST) --changed-since=$(SINCE) -m "soak and alone"

# Records the golden run again, after a method's version was raised.
golden: $(VENV)/dev
	PYTHONPATH=. $(BIN)/python tests/golden_test.py

# Runs TARGETS on Debian's newest Python with the newest JAX, in a separate
# system root. Needs Linux, root and debootstrap.
TARGETS ?= test-core
test-newest:
	tests/newest.sh $(TARGETS)

# A source distribution and a wheel made from it, in dist/.
dist: $(VENV)/dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation

# Style, and the types of the package.
lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check --python $(VENV) edgc_jax

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The protocol's study (docs/results.md), one run a core; it takes many hours,
# and the same target continues it. Records go to results/records/.
STUDY := $(BIN)/python experiments/lab/run_study.py --jobs=$(shell nproc)

protocol: $(VENV)/train
	$(STUDY) $(foreach name,full_length table rounds low_rank overlap muon \
	  entropy,--study=configs/protocol/$(name).py)

# Whether a rank that follows entropy wins in a run of 20,000 steps (docs/results.md):
# days on two cores, hours on a GPU with --together.
horizon: $(VENV)/train
	$(STUDY) --study=configs/paper/horizon.py

# Tables and pictures of all pages, from records: minutes.
pages: $(VENV)/train
	$(BIN)/python -m experiments.lab.pages

# The documentation as a site: open site/index.html. test-slow builds it, too.
docs: $(VENV)/train $(VENV)/site
	$(BIN)/python -m experiments.lab.pages.site

# The paper's three models compiled for their meshes, without the devices, and
# their runs modelled: results/paper.md. Takes some minutes, and 8 GiB.
plan-paper: $(VENV)/train
	for size in 345m 2b5 12b; do \
	  $(BIN)/python experiments/lab/plan_layout.py --output=results/data/paper_layouts.json \
	    --config=configs/paper/gpt2_$$size.py || exit; \
	done
	$(BIN)/python -m experiments.lab.planning.paper_clusters

# Step times on virtual hosts with slow links, compared with PyTorch. Needs
# Linux, root and iproute2; takes half an hour. Result: results/data/network.json.
bench-network: $(VENV)/train
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/python -m experiments.lab.network --config=configs/gpt2_10m.py

# How much of an exchange of local steps, and of sites, runs beside inner steps.
# Needs Linux, root and iproute2. Result: results/data/overlap.json.
bench-overlap: $(VENV)/train $(VENV)/emulators
	$(BIN)/python -m experiments.lab.network.overlap --rate=100

# Rounds and runs of sites on virtual hosts, through an object store; 20 minutes.
# Needs Linux, root and iproute2. Results: results/data/site_rounds.json and
# site_runs.json.
bench-sites: $(VENV)/train $(VENV)/emulators
	rm -rf runs/site_runs results/data/site_runs.json
	$(BIN)/python -m experiments.lab.network.sites --rounds=3
	$(BIN)/python -m experiments.lab.network.site_runs --steps=90 --rate=10 \
	  --rate=100 --round_trip=50

clean:
	rm -rf $(VENV) .newest .pytest_cache build dist site
