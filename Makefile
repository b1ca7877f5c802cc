# Every target makes .venv on first use, and again when its inputs change.
# ARGS is handed on:  make train ARGS="--parallel replicate"   make test ARGS="-k layout"

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/installed
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Ranks share the cores of one machine.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: train test lint bench

train: $(INSTALLED)
	torchrun --standalone --nproc-per-node 2 examples/train_gpt.py $(ARGS)

test: $(INSTALLED)
	timeout --kill-after=30 720 python -m pytest $(ARGS)

# All files that git knows or would take, so that a new file is checked before it is added.
lint: $(INSTALLED)
	git ls-files --cached --others --exclude-standard | while read -r file; do test ! -f "$$file" || echo "$$file"; done > $(VENV)/files
	lintrunner --data-path $(VENV)/lintrunner init
	lintrunner --data-path $(VENV)/lintrunner --paths-from $(VENV)/files $(ARGS)

bench: $(INSTALLED)
	python benchmarks/step_time.py $(ARGS)
	python benchmarks/host_overhead.py $(ARGS)
	python benchmarks/memory.py $(ARGS)
	python benchmarks/optimizer.py $(ARGS)
	python benchmarks/checkpoint.py $(ARGS)

# The build tools come first: with build isolation pip would fetch them, and torch, anew.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	python -m pip install --quiet -c constraints.txt setuptools wheel
	python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev,examples]'
	touch $@
