# Each target is, alone, all the set-up there is: it needs Python 3.11 and make, builds .venv if it is missing, and reuses it.
.DELETE_ON_ERROR:
.PHONY: help demo examples test test-all test-compiled test-device-branch test-gpu test-peers test-portability test-versions docs docs-serve lint types types-package types-scripts build/typed check bench bench-advice bench-auto bench-gpu bench-network bench-scale chaos frontier mutate mutate-emulated fuzz soak soak-torch soak-long clean

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Test processes. Several tests wait for processes of their own, so a third has something to do on two cores.
JOBS ?= 3
ARGS ?=

BIN := .venv/bin
READY := .venv/ready
# Most files of the packages are never imported: to compile them all would take as long as all the rest.
INSTALL := $(BIN)/pip install --no-compile -q -c constraints.txt

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

# torch alone and first, at its exact version: a resolver that is given a range may fetch several builds of some gigabytes to compare.
# Without build isolation the editable install is built by the pinned setuptools, and nothing is fetched behind pip's back.
$(READY): pyproject.toml constraints.txt
	@echo 'Setting up .venv, once. This takes some minutes.'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(INSTALL) torch==2.13.0
	$(INSTALL) setuptools
	$(INSTALL) --no-build-isolation -e '.[dev]'
	@touch $@

demo: $(READY) ## train a small language model with and without PowerSGD, in torch and in JAX
	$(BIN)/python examples/demo.py $(ARGS)

examples: $(READY) ## the scripts to copy, each as its first lines say; fetches Ray, 500 MB, into build/ray
	$(PYTEST) tests/examples/test_scripts.py $(ARGS)
	test -d build/ray/ray || $(BIN)/pip install -q --no-compile --target build/ray 'ray[train]'
	PYTHONPATH=$(CURDIR)/build/ray $(BIN)/python examples/scripts/ray_train.py

# What pytest makes of the tests' assertions is kept, also where Python is told to write no compiled files: every run would do it again.
unexport PYTHONDONTWRITEBYTECODE
# A process that dies ends the run: xdist waits for ever for the last test of a file that another process has taken over.
PYTEST := $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
# Tests that take long and prove little that others do not carry the mark `slow`: whether benchmarks, the demo and other scripts run, other libraries,
# restarts under torchrun, options of sharded models, a mixture of optimizers in torch,
# wrappers and training features in all combinations, dtypes and slices in JAX, requests on the emulated accelerator,
# and what of the largest tables differs only in numbers.
QUICK := -m 'not slow'

test: $(READY) ## what proves the product
	$(PYTEST) $(QUICK) $(ARGS)

test-all: $(READY) ## the same, and what takes long: benchmarks, the demo, restarts under torchrun, the largest tables
	$(PYTEST) $(ARGS)

CONFIG ?=
test-portability: $(READY) ## the tests of `make test` as on other processors, on 1, 2 and 4 cores, on busy ones, and whether bounds are within reach of rounding; only CONFIG="sse bounds"
	$(BIN)/python -m tests.portability $(CONFIG) -- $(PYTEST) $(QUICK) $(ARGS)

# What compiles for accelerators: libtpu, and XLA for CUDA.
COMPILERS := libtpu==0.0.52 jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2
# The first test of a model waits for all its methods: 130 s of a processor, and more of the clock where others need it too.
test-compiled: $(READY) ## what the compilers of TPU and H100 make of it, without one of them; fetches 340 MB into build/compilers
	test -d build/compilers/libtpu || $(BIN)/pip install -q --no-compile --no-deps --target build/compilers $(COMPILERS)
	GRADWIRE_TEST_COMPILED=1 $(PYTEST) -o timeout=1860 -o faulthandler_timeout=1900 -rP tests/compiled $(ARGS)

VERSIONS ?=
test-versions: $(READY) ## the core, the parity tables and torch on the oldest and newest Python, torch and jax, and on torch between; only VERSIONS="oldest"
	test -x $(BIN)/uv || $(INSTALL) uv
	$(BIN)/python -m tests.versions $(VERSIONS)

test-device-branch: $(READY) ## the torch tests once more, by the branch for tensors on a device
	GRADWIRE_TEST_DEVICE_BRANCH=1 $(PYTEST) $(QUICK) tests/torch tests/parity/test_torch.py tests/parity/test_kernels.py $(ARGS)

# In $$python: the first whose torch sees a GPU, or that of the tests.
FIND_GPU = for python in $(BIN)/python python3 python; do \
	  if $$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then break; fi; python=; \
	done; \
	if [ -z "$$python" ]; then $(MAKE) -s --no-print-directory $(READY) && python=$(BIN)/python; fi
test-gpu: build/typed ## kernels and replays on a GPU of NVIDIA's, in some minutes; without one it says so
	@$(FIND_GPU) && \
	PYTHONPATH=build/typed:. $$python -m tests.gpu

ROWS ?=
test-peers: $(READY) ## torch's own tests of hooks, averagers and DDP, against gradwire, in some minutes; only ROWS="names hook"
	$(BIN)/python -m tests.peers $(ROWS) $(ARGS)

# mkdocstrings reads the package, as type checkers do, from a folder of links.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
docs: $(READY) build/typed ## the documentation site, in build/site; a warning is an error
	$(MKDOCS) build --strict
	@echo 'Open build/site/index.html, or run `make docs-serve`, which also searches.'

docs-serve: $(READY) build/typed ## the same on http://127.0.0.1:8000, renewed as files change
	$(MKDOCS) serve

lint: $(READY) ## ruff, format included
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Scripts call frameworks whose own annotations have gaps: that is nothing a reader of an example should have to see silenced.
SCRIPTS := --follow-imports=silent --untyped-calls-exclude=flax --untyped-calls-exclude=jax --untyped-calls-exclude=torch --disable-error-code=import-untyped

# Type checkers cannot follow the map from names to folders of an editable install: they read a folder of links.
build/typed:
	@rm -rf $@ && mkdir -p $@/gradwire
	@ln -s $(CURDIR)/core/api/* $@/gradwire/
	@ln -s $(CURDIR)/core $(CURDIR)/torch_backend $(CURDIR)/jax_backend $@/gradwire/

types: types-package types-scripts ## mypy --strict

types-package: $(READY) build/typed
	MYPYPATH=build/typed $(BIN)/mypy --strict -p gradwire

types-scripts: $(READY) build/typed
	MYPYPATH=build/typed:examples:benchmarks:benchmarks/network $(BIN)/mypy --strict --cache-dir=.mypy_cache/scripts $(SCRIPTS) examples benchmarks docs/site_hooks.py docs/parameter_order.py

check: lint types test ## lint, types and tests

bench: $(READY) ## what compression costs in torch and in JAX, what buckets and sharded optimizers do, what overlaps
	$(BIN)/python benchmarks/compress.py
	$(BIN)/python benchmarks/loops.py
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/buckets.py
	$(BIN)/python benchmarks/zero.py
	$(BIN)/python benchmarks/muon.py
	$(BIN)/python benchmarks/jax_step.py
	$(BIN)/python benchmarks/stacks.py
	$(BIN)/python benchmarks/half_step.py
	$(BIN)/python benchmarks/error_feedback.py
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/watching.py

# With the first Python whose torch sees a GPU, as it is: the packages of .venv are for the CPU, and such a machine may have no network. It needs
# torch and, for the part in JAX, jax, flax and optax.
bench-gpu: build/typed ## what compression costs on a GPU, in eight minutes; without one, tiny sizes that only show that it runs
	@$(FIND_GPU) && \
	PYTHONPATH=build/typed $$python benchmarks/gpu $(ARGS)

bench-network: $(READY) ## step time between hosts on shaped links (Linux, as root)
	$(BIN)/python benchmarks/network $(ARGS)
	$(BIN)/python benchmarks/network/diloco.py
	$(BIN)/python benchmarks/network/nodes.py

LENGTH ?= 240 1440
frontier: $(READY) ## every method in torch and in JAX, LENGTH steps (240 1440): loss against bytes and time, in three hours; goes on where it was stopped
	$(BIN)/python benchmarks/frontier --steps $(LENGTH) $(ARGS)

bench-scale: $(READY) ## how what a step needs grows with ranks, tensors and leaves, in a quarter of an hour
	$(BIN)/python benchmarks/scale $(ARGS)

bench-advice: $(READY) ## what is recommended on shaped links, and what is fastest there, in two hours (Linux, as root); goes on where it ended
	$(BIN)/python benchmarks/advice/readme.py
	$(BIN)/python benchmarks/advice $(ARGS)

bench-auto: $(READY) ## what it costs that Auto finds the method while it trains, by a simulated clock and measured steps
	$(BIN)/python benchmarks/auto.py $(ARGS)

SEED ?= 1
mutate: $(READY) ## 120 mutations of the product, drawn by SEED (1), each against the tests of its line; goes on where it was stopped
	$(BIN)/python -m tests.mutate --seed $(SEED) $(ARGS)

mutate-emulated: $(READY) ## mutations that an accelerator would mind, each against tests on the emulated one; goes on where it was stopped
	$(BIN)/python -m tests.emulated.mutations $(ARGS)

MINUTES ?= 10
fuzz: $(READY) ## options, states, texts, files and gradients that are wrong, for MINUTES (10), from SEED (1) on: all counts have to be 0
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED) $(ARGS)

soak: $(READY) ## random histories in the simulator, for MINUTES (10)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak.simulation --minutes $(MINUTES) $(ARGS)

STEPS ?= 10000
soak-torch: $(READY) ## three real processes, random faults, all ranks compared every 100 steps, for STEPS (10000)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak.torch_soak --steps $(STEPS) $(ARGS)

CHAOS_MINUTES ?= 10
chaos: $(READY) ## replicas over a real lighthouse that are killed, frozen, slow and replaced, for CHAOS_MINUTES (10), then without chaos for comparison; and ranks that choose their method
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --minutes $(CHAOS_MINUTES) $(ARGS)

soak-long: $(READY) ## two real processes, 5,000 steps behind each front door and 200 process groups, memory and threads watched, in ten minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak.long_run $(ARGS)

clean: ## what the other targets left, .venv excepted
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find core torch_backend jax_backend tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
