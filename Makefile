# Every target makes .venv on first use, and again when its inputs change, with what it needs and no more.
# What to test:  make test, minutes; make test-all, everything; make test-rest, what make test leaves out
# ARGS is handed on:  make train ARGS="--parallel replicate"   make test ARGS="-k layout"
# TORCH takes another torch, in an environment of its own of some gigabytes:  make test TORCH=2.15.0

PYTHON ?= python3
VENV := .venv$(TORCH:%=-torch-%)
# What is installed: the marks that the rules at the end leave, and the extras of each.
TRAINS := $(VENV)/trains
TESTS := $(VENV)/tests
ALL := $(VENV)/all
SITE := $(VENV)/site
$(TRAINS): EXTRAS := examples
$(TESTS): EXTRAS := dev,examples
$(ALL): EXTRAS := dev,examples,clients,storage
$(SITE): EXTRAS := docs
CONSTRAINTS := $(if $(TORCH),$(VENV)/)constraints.txt
OWN_PATH := $(PATH)
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Ranks share the cores of one machine.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# What inductor has compiled against the headers of one environment is wrong for another.
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/$(VENV)/inductor

.PHONY: train test test-rest test-all launchers gpu lint bench docs

train: $(TRAINS)
	torchrun --standalone --nproc-per-node 2 examples/train_gpt.py $(ARGS)

test: $(TESTS)
	python -m tests.side_by_side --tier first $(ARGS)

test-rest: $(ALL)
	python -m tests.side_by_side --tier rest $(ARGS)

test-all: $(ALL)
	python -m tests.side_by_side $(ARGS)

# Under Slurm, which this installs as root by apt-get, torchruns on two hosts, and what pip can get: at most 10 minutes.
# LAUNCHERS takes some of these tests, Slurm only for its own. What cannot be had is skipped.
launchers: $(ALL)
	-python -m pip install --quiet -c $(CONSTRAINTS) --no-build-isolation -e '.[launchers]'
	$(if $(findstring slurm,$(or $(LAUNCHERS),slurm)),python -m tests.launchers.slurm)
	python -m pytest $(or $(LAUNCHERS),tests/launchers) $(ARGS)

# All that a GPU can show, in six minutes, with the machine's own torch: nothing is installed.
gpu:
	PATH="$(OWN_PATH)" $(PYTHON) -m tools.gpu --out build/gpu $(ARGS)

# The site, in build/site: pages, and a reference made of docstrings. Warnings and dead links are errors.
docs: $(SITE)
	python docs/site/build.py build/site

# All files that git knows or would take, so that a new file is checked before it is added.
lint: $(TESTS)
	git ls-files --cached --others --exclude-standard | while read -r file; do test ! -f "$$file" || echo "$$file"; done > $(VENV)/files
	lintrunner --data-path $(VENV)/lintrunner init
	lintrunner --data-path $(VENV)/lintrunner --paths-from $(VENV)/files $(ARGS)
	python .ci/lint/commits.py

bench: $(TRAINS)
	python benchmarks/step_time.py $(ARGS)
	python benchmarks/host_overhead.py $(ARGS)
	python benchmarks/hot_path.py
	python benchmarks/memory.py $(ARGS)
	python benchmarks/optimizer.py $(ARGS)
	python benchmarks/checkpoint.py $(ARGS)

# The build tools come first: with build isolation pip would fetch them, and torch, anew.
# Another torch has its own bounds for setuptools (2.11 wants one below 82), and its own torchvision.
$(VENV)/torch: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),{ sed -E '/^(torch|torchvision|setuptools)==/d' constraints.txt; echo torch==$(TORCH); } > $(CONSTRAINTS))
	python -m pip install --quiet -c $(CONSTRAINTS) $(if $(TORCH),torch 'setuptools>=77',setuptools) wheel
	touch $@

$(TRAINS) $(TESTS) $(ALL) $(SITE): $(VENV)/torch
	python -m pip install --quiet -c $(CONSTRAINTS) --no-build-isolation -e '.[$(EXTRAS)]'
	touch $@
