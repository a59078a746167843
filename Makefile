# One door: the same targets on a laptop and in CI. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install install-dev quickstart serve test fuzz check docs format bench lock sbom audit clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

BUILT := pyproject.toml constraints.txt hatch_build.py $(wildcard recsys/native/*.[ch])
$(VENV)/.base: $(BUILT)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt --editable .
	touch $@

# Not after .base, so that a clean clone compiles the library once.
$(VENV)/.dev: $(BUILT)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev,docs,postgres,ray]'
	touch $(VENV)/.base $@

install: $(VENV)/.base ## create .venv with what running needs
install-dev: $(VENV)/.dev ## the same and what tests and checks need

quickstart: install ## synthetic shop -> models -> report -> a recommendation, in minutes
	$(BIN)/recsys quickstart

serve: install ## serve what quickstart made, on http://127.0.0.1:8000
	$(BIN)/recsys serve

# The tests start many processes: each would compile the sources anew if none could keep them.
TESTING := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python

# One more than there are cores, since some tests wait for processes and clocks; nproc counts threads
# of OpenMP where their number is set.
WORKERS ?= $(shell expr $$(env -u OMP_NUM_THREADS nproc) + 1)
test: install-dev ## all tests (CPU, offline), side by side
	$(TESTING) -m pytest -n $(WORKERS) --dist worksteal --durations 25

MINUTES ?= 5
fuzz: install-dev ## fresh examples for the tests that take any: make fuzz MINUTES=20
	$(TESTING) tests/fuzz.py $(MINUTES)

check: install-dev ## format, lint, types, import contracts, spelling, documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell recsys data training serving benchmarks docs *.md
	$(MAKE) docs

docs: install-dev ## the documentation site, into var/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

format: install-dev ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install ## exactness and speed against Hugging Face
	OMP_NUM_THREADS=1 $(BIN)/python tests/stress/huggingface_exactness.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/decode.py --threads 1 --beams 20 --batches 1 8 --reuse cold

$(VENV)/.audit: $(VENV)/.base
	$(PIP) install --quiet --constraint constraints.txt --editable '.[audit]'
	touch $@

# The image has a torch without CUDA, from another index: deploy/Dockerfile installs it. hatchling
# builds our own package there.
CUDA := cuda-bindings cuda-toolkit nvidia-cudnn-cu13 nvidia-cusparselt-cu13 nvidia-nccl-cu13 \
	nvidia-nvshmem-cu13 triton
LOCKED := deploy/requirements.txt
lock: $(VENV)/.audit ## deploy/requirements.txt: the packages of the image, with hashes
	mkdir -p var
	echo hatchling > var/build.in
	printf '%s\n' $(CUDA) | $(BIN)/uv pip compile --quiet --upgrade pyproject.toml var/build.in \
	  --extra postgres --constraint constraints.txt --excludes /dev/stdin \
	  --no-emit-package torch --python-version 3.11.14 --generate-hashes --no-annotate \
	  --custom-compile-command 'make lock' --output-file $(LOCKED)

var/image.txt: $(LOCKED) constraints.txt
	mkdir -p var
	grep '^torch==' constraints.txt | cat $(LOCKED) - > $@

sbom: $(VENV)/.audit var/image.txt ## the packages of the image as CycloneDX, into var/sbom.json
	$(BIN)/cyclonedx-py requirements var/image.txt --pyproject pyproject.toml \
	  --output-reproducible --output-file var/sbom.json

# --strict: a package that the database does not answer for is a failure and not a pass.
audit: $(VENV)/.audit var/image.txt ## known vulnerabilities of these packages (asks pypi.org)
	$(BIN)/pip-audit --strict --progress-spinner off --no-deps --disable-pip -r var/image.txt

clean: ## remove everything that was made here, the environment included
	rm -rf $(VENV) var dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
