# Everything a fresh machine needs is python3 (3.10 or newer, with venv) and make.
PYTHON ?= python3
BIN := .venv/bin
DEMO_SECONDS ?= 120
PYTEST := $(BIN)/python -m pytest -n 2

.PHONY: demo test test-full faults licences lint format site notebooks figures browser peers clean

demo: .venv/.demo  ## train a small model, print a table and a sample, save the loss curve
	$(BIN)/postil train --experiment demo --out runs/demo --overwrite --max-time $(DEMO_SECONDS)
	@echo
	@$(BIN)/postil info runs/demo
	@echo
	@$(BIN)/postil sample runs/demo --prompt "It is " --tokens 300
	@echo
	@echo "The loss curve is in runs/demo/loss.png."

test: .venv/.dev  ## the tests that run in every change
	$(PYTEST) -m "not slow"

test-full: .venv/.dev  ## every test, the long ones too
	$(PYTEST)

faults: .venv/.dev  ## the whole fault suite
	$(PYTEST) tests/faults tests/security tests/fuzz tests/distributed/test_losing_ranks.py \
	  tests/distributed/test_world_sizes.py \
	  tests/pages/test_site.py::test_a_build_that_is_killed_leaves_the_old_site \
	  tests/pages/test_site.py::test_a_full_disk_leaves_the_old_site

licences: .venv/.demo  ## every package that an installation brings, with its licence, into licences.md
	$(BIN)/python docs/list_licences.py plot bpe pages > licences.md

lint: .venv/.dev  ## style, types and the directions of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: .venv/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

site: .venv/.dev  ## our whole site, in three languages
	$(BIN)/postil pages build src/postil --out site --run

notebooks: .venv/.dev  ## the pages that bring something to try, as notebooks
	$(BIN)/postil pages notebooks src/postil

figures: .venv/.dev  ## what README and docs show of benchmarks/results
	$(BIN)/python benchmarks/picture.py
	$(BIN)/python benchmarks/claims.py
	$(BIN)/python benchmarks/readme.py

browser: tests/browser/node_modules  ## the checkers that the browser tests use (needs npm)

peers: .venv-peers/.done  ## other implementations, in an environment of their own, to compare with

# The demo needs little; the tests need all. A stamp says what has been installed from which files.
.venv/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[plot]"
	touch $@

.venv/.dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@ .venv/.demo

tests/browser/node_modules: tests/browser/package.json
	npm install --silent --no-audit --no-fund --no-package-lock --prefix tests/browser
	touch $@

.venv-peers/.done: benchmarks/peers.txt benchmarks/peers-no-deps.txt constraints.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet -c constraints.txt -r benchmarks/peers.txt
	.venv-peers/bin/python -m pip install --quiet --no-deps -r benchmarks/peers-no-deps.txt
	touch $@

clean:
	rm -rf .venv .venv-peers runs site .pytest_cache .ruff_cache
