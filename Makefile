# The main commands: `make up` runs a cluster with a real model, `make test` runs all tests, and `make bench` measures. They
# need nothing but Python 3.11 or later. Everything they install stays in .venv and in the user's cache folder.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
MODEL := smollm2
WORKERS ?= 2
KILLS ?= 500
TIMES ?= 10
SEEDS ?= 10000
SOURCES_OF_INSTALL := pyproject.toml proto/build_stubs.py $(wildcard proto/unbroken/v1/*.proto)
VERSION := $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)
RECORD := proto-released/$(VERSION)
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo -n)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help up test test-clients surface simulate compose-test kill-loop frontend-loss storm attacks bench bench-small hold scale lint lint-proto record-proto pages stubs install install-dev model etcd iproute2 wrk curl chromium peer peer-smg clean
.DELETE_ON_ERROR:

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{ printf "%-12s %s\n", $$1, $$2 }'

up: install model ## Run a registry, two workers with a real model and a frontend. Ctrl-C stops all.
	exec $(BIN)/unbroken up --workers $(WORKERS) --engine llamacpp --model $(MODEL)

test: install-dev model etcd iproute2 wrk curl ## Install what the tests need, and run all tests.
	$(BIN)/pytest --numprocesses=2 --dist=loadfile --ignore=tests/clients

test-clients: install-dev chromium ## Run the clients in other languages for which this machine has the tools.
	$(BIN)/pytest tests/clients

surface: install-dev ## Send 35,000 random requests, valid or not by the OpenAPI document. About 15 minutes.
	SURFACE_TIMES=$(TIMES) SURFACE_SEED=$${SEED:-$$(date +%s)} $(BIN)/pytest tests/clients/test_surface.py

compose-test: install-dev ## Test `docker compose up`, and kill containers under streams. Needs Docker; minutes at first.
	$(BIN)/pytest tests/compose -v --tb=short

simulate: install-dev ## Run SEEDS (10,000) fault schedules through whole planes, in virtual time.
	$(BIN)/python -m simulation campaign --seeds $(SEEDS)

kill-loop: install-dev ## Kill 500 workers under load, one per second, and count what clients notice.
	$(BIN)/python -m bench.kill_loop --kills $(KILLS)

frontend-loss: install-dev ## Kill a frontend under 200 streams, and measure what clients notice that come back.
	$(BIN)/python -m bench.frontend_loss
	$(BIN)/python -m bench.kept_cost

storm: install-dev ## Send 5,000 requests at once to one worker, and measure the effect on everything else.
	$(BIN)/python -m bench.storm --frontend=--admin-listen=127.0.0.1:0

attacks: install-dev ## Attack a frontend over HTTP/2 in many ways, and measure the longest gap of the streams beside.
	$(BIN)/python -m bench.attacks

bench: install-dev wrk ## Compare with NVIDIA Dynamo and SMG. About 25 minutes; keep the machine idle otherwise.
	@$(MAKE) --no-print-directory peer || echo "note: Dynamo cannot be installed here: its columns will be empty" >&2
	@$(MAKE) --no-print-directory peer-smg || echo "note: SMG cannot be installed here: its columns will be empty" >&2
	$(BIN)/python -m bench.compare

bench-small: install-dev wrk ## Run the comparison for seconds, to see that it works: its figures mean nothing.
	$(BIN)/python -m bench.compare --no-peer --streams 2,8 --lost-streams 4 --saturated-streams 8 --rounds 1 \
		--seconds 0.3 --tokens 50 --results $(VENV)/bench-small

hold: install-dev ## Hold 10,000 slow streams for a minute over HTTP, then over gRPC: memory per stream, and how evenly tokens arrive.
	$(BIN)/python -m bench.hold

scale: install-dev ## Measure what a frontend and a registry cost with 1,000 workers, 10,000 streams, 10,000 instances.
	$(BIN)/python -m bench.scale

lint: lint-proto ## Check style, types and proto files.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

lint-proto: install-dev ## Check the proto files, and that they are compatible with the last release.
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	@test -d $(RECORD) || { echo "error: version $(VERSION) has no record of its proto files: make record-proto" >&2; exit 1; }
	$(BIN)/buf breaking --against $(RECORD)

record-proto: install-dev ## Record the proto files of this version, at its release.
	for record in proto-released/*; do $(BIN)/buf breaking --against "$$record" || exit 1; done
	rm -rf proto-released
	mkdir -p $(RECORD)
	cp -R proto/unbroken $(RECORD)

pages: install-dev ## Regenerate the tables in README.md, DESIGN.md and docs/.
	$(BIN)/python -m tests.docs.tables

stubs: $(BIN)/python ## Regenerate the gRPC stubs.
	$(BIN)/pip install --quiet --no-deps --editable .

install: $(INSTALLED) ## Install the package, the llama.cpp engine and `unbroken certs` into .venv.

install-dev: $(INSTALLED_DEV) ## Also install the tools for tests and lint.

model: install ## Download the model that `up` and the tests use.
	$(BIN)/unbroken models pull $(MODEL)

# $(call from_apt,COMMAND,PACKAGE,what the user can do instead)
define from_apt
	@command -v $(1) >/dev/null || { command -v apt-get >/dev/null && $(SUDO) true \
		&& $(SUDO) apt-get update -qq \
		&& $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(2); } \
		|| { echo "error: $(1) is needed and cannot be installed here: $(3)" >&2; exit 1; }
endef

etcd: ## Install etcd for the tests, with apt.
	$(call from_apt,etcd,etcd-server,install etcd 3.4 or later and put it on PATH)

iproute2: ## Install `ip` for the tests that cut a network, with apt.
	$(call from_apt,ip,iproute2,install it or run pytest -m 'not netns')

wrk: ## Install `wrk` for the bench, with apt.
	$(call from_apt,wrk,wrk,install wrk 4.1 or later and put it on PATH)

curl: ## Install `curl` for the commands in the documentation, with apt.
	$(call from_apt,curl,curl,install it and put it on PATH)

chromium: ## Install Chromium for the tests of pages, with apt.
	$(call from_apt,chromium,chromium,install it and put it on PATH or run pytest tests/clients)

peer: model etcd ## Install NVIDIA Dynamo into the user's cache folder, for the comparison.
	bench/peer/dynamo.sh install "$$($(BIN)/python -c 'from services.models.download import SMOLLM2; print(SMOLLM2.path)')"

peer-smg: curl ## Install SMG into the user's cache folder, for the comparison.
	bench/peer/smg.sh install

clean: ## Remove everything that was installed or generated here.
	rm -rf $(VENV) $(VENV)-* services/stubs/*_pb2*

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Python 3.11 or later is needed: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' \
		|| { echo "error: $(PYTHON) cannot make virtual environments: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'

$(INSTALLED): $(SOURCES_OF_INSTALL) | $(BIN)/python
	$(BIN)/pip install --quiet --editable '.[llamacpp,certs]'
	@touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(BIN)/pip install --quiet --editable '.[llamacpp,huggingface,certs]' --group dev
	@touch $@
