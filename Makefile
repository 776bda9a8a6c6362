# Every command of the project. `make` lists them; .ci/run calls nothing else.
SHELL := /bin/bash
.DEFAULT_GOAL := help
CACHE ?= $(or $(PERSIST_CACHE),$(HOME)/.cache/persist-operator)
export PATH := $(CACHE)/bin:$(HOME)/.local/bin:$(PATH)
# Empty counts as unset: without bytecode files every Python process compiles all that it imports, which takes seconds.
export PYTHONDONTWRITEBYTECODE :=
PYTHON_DIRS := engine operator spark-images tests bench examples proto charts docs .ci
RUN := uv run --frozen
PYTEST := $(RUN) pytest
ARGS ?=

##@ Setup
help: ## this list
	@awk 'BEGIN{FS=":.*## "} /^##@/{printf "\n%s\n",substr($$0,5)} /^[a-z0-9-]+:.*## /{printf "  \033[1m%-14s\033[0m %s\n",$$1,$$2}' $(MAKEFILE_LIST)
setup: ## install what demo and tests need: uv, Python packages, a JDK 17, redis-server, versitygw, Prometheus with promtool, Chromium, the histories' checker, kstatus, a runner of Lua, a Kafka broker and Spark's connector, helm; names what it could not get
	@bash .ci/tools.sh uv java javac redis versitygw prometheus chromium checker kstatus lua connector broker helm
	@uv sync --frozen --quiet
	@$(RUN) python spark-images/catalog/build_catalog.py
	@$(RUN) python tests/spark/class_archive.py build/spark.jsa
catalog: ## build the jar of the SQL catalog into the package persist_spark, unless it is up to date
	@bash .ci/tools.sh uv javac && uv sync --frozen --quiet && $(RUN) python spark-images/catalog/build_catalog.py
setup-demo: ## install what `make demo` needs: uv, Java 17, the Python packages except those of the tests
	@bash .ci/tools.sh uv java
	@uv sync --frozen --quiet --inexact --no-default-groups --group demo
clean: ## remove the files that the targets below create in the tree
	rm -rf .persist build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis examples/flights/data spark-images/persist_spark/catalog/*.jar

##@ Use
demo: setup-demo ## the product on this machine: 336,776 flights through sinks, maintained and read back; an edit, the past, a crash
	@uv run --no-sync python examples/flights/demo.py

##@ Code
fmt: ## format
	@$(RUN) ruff format $(PYTHON_DIRS) && $(RUN) ruff check --fix $(PYTHON_DIRS)
lint: ## ruff: style, names, docstrings, banned clocks and randomness
	@$(RUN) ruff format --check $(PYTHON_DIRS) && $(RUN) ruff check $(PYTHON_DIRS)
types: ## mypy strict; examples also with pyright
	@$(RUN) mypy engine/persist_engine operator/persist_operator spark-images/persist_spark tests/kit/persist_kit
	@MYPYPATH=examples/flights $(RUN) mypy examples/flights examples/tables
	@$(RUN) mypy examples/gitops/argocd/build.py
	@$(RUN) basedpyright --warnings
rooms: ## import-linter: which room may import which
	@$(RUN) lint-imports --no-cache
tidy: ## house rules as a test
	@$(PYTEST) -q tests/test_tidy.py
docs: ## the documentation site into build/site; fails on any warning
	@NO_MKDOCS_2_WARNING=1 $(RUN) --group docs mkdocs build --strict --quiet

##@ Formats
proto: ## regenerate engine/persist_engine/pb from proto/
	@$(RUN) python proto/generate.py
proto-check: ## fail if the generated code does not match proto/
	@$(RUN) python proto/generate.py --check
crds: ## copy crds/ into the charts, and write the chart's table of values
	@$(RUN) python charts/sync_crds.py && $(RUN) python charts/values_table.py
crds-check: ## fail if the charts' CRDs differ from crds/, or the table of values from values.yaml
	@$(RUN) python charts/sync_crds.py --check && $(RUN) python charts/values_table.py --check

console-figure: ## the picture of the console in the README, from the shards of `make demo`
	@bash .ci/tools.sh uv chromium && $(RUN) python examples/flights/console_figure.py

dashboards: ## write the Grafana dashboards into the chart
	@$(RUN) python charts/dashboards/build.py
dashboards-check: ## fail if the chart's dashboards are not what their program makes
	@$(RUN) python charts/dashboards/build.py --check

##@ Tests
test: setup ## all tests that need no cluster, in four processes unless JOBS says otherwise, since many wait; names the thirty slowest
	@$(PYTEST) -n $(or $(JOBS),4) --dist loadfile -m "not kind and not release" --durations=30 --durations-min=1 $(ARGS)
test-fast: ## the quick tests: no server, no Spark, nothing slow
	@bash .ci/tools.sh uv && uv sync --frozen --quiet
	@PERSIST_NO_SERVERS=1 $(PYTEST) -n $(or $(JOBS),2) --dist loadfile -q -m "not kind and not release and not redis and not s3 and not spark and not slow" $(ARGS)
generated: setup ## 1,000 generated queries against Parquet and 12,000 generated resources under refusals: DEPTH=10 [FIRST=0, added to each seed]
	@PERSIST_DEPTH=$(or $(DEPTH),10) PERSIST_FIRST=$(or $(FIRST),0) $(PYTEST) -n 2 --dist loadfile -q -o timeout=900 tests/spark/test_generated_queries.py tests/operator/truth/test_generated.py
sim: setup ## the engine under seeded schedules and faults: SEEDS=2000 [FIRST= JOBS=], or SEED=17 to repeat one; WITHOUT=disaster,crash omits kinds of faults
	@$(RUN) python -m persist_kit.sim.main --seeds $(or $(SEEDS),200) --first $(or $(FIRST),0) --jobs $(or $(JOBS),1) $(if $(SEED),--seed $(SEED)) $(if $(WITHOUT),--without $(WITHOUT))
linearizability: setup ## list-append histories over processes on real servers behind a fault proxy: HISTORIES=20 [FIRST=0 KEEP=folder]
	@$(RUN) python -m persist_kit.histories.main --histories $(or $(HISTORIES),20) --first $(or $(FIRST),0) $(if $(KEEP),--keep $(KEEP))
kills: setup ## drivers and executors of two Streaming sinks, killed at random points: KILLS=200 [SEED=0]
	@$(RUN) python tests/spark/kills.py --kills $(or $(KILLS),200) --seed $(or $(SEED),0)
fuzz: setup ## every decoder under atheris: RUNS=10000 executions each, or one TARGET=state_diff
	@for target in $(or $(TARGET),$$($(RUN) python -m persist_kit.fuzz.targets)); do echo "== $$target"; \
	  $(RUN) --group fuzz python -m persist_kit.fuzz.main $$target --corpus tests/fuzz/corpus --runs $(or $(RUNS),10000) $(if $(GROWN),--grown $(GROWN)) || exit 1; done
argo: setup ## the Lua for Argo CD with Argo CD's own code, which takes minutes to build
	@bash .ci/tools.sh argo
	@$(PYTEST) -q tests/operator/truth/test_argo.py $(ARGS)
signing: setup ## a whole release into a registry behind TLS, signed with a key by cosign, and verified: minutes, with a container engine more
	@bash .ci/tools.sh cosign registry
	@$(PYTEST) -q tests/test_signing.py $(ARGS)
e2e: setup ## on a real kind cluster: create it, install, apply, inject faults, check, remove it (KEEP=1 keeps it)
	@bash .ci/tools.sh kind helm && bash tests/e2e/run.sh
bench: setup ## hot paths as ratios against a baseline of the same run
	@$(RUN) --group bench python -m bench $(ARGS)

##@ Ship
images: ## build persist-engine, persist-operator and persist-spark (with docker, else buildah)
	@bash .ci/tools.sh uv javac && bash spark-images/build.sh
release: catalog ## wheels, chart, bills of materials and images into dist/; REGISTRY=host/path pushes images and chart, IMAGES=no omits images, SIGN=keyless or a key signs
	@bash .ci/tools.sh uv helm $(if $(SIGN),cosign) && bash .ci/release.sh
cluster-up: ## create a kind cluster: docker and the official node image, else podman and one built here
	@bash .ci/tools.sh kind helm && bash tests/e2e/cluster/cluster.sh up
cluster-demo: setup ## a kind cluster with stores and the operator, for examples/flights (docs/tutorial.md); cluster-down removes it
	@bash .ci/tools.sh kind helm && bash examples/cluster/up.sh
cluster-down: ## remove the kind cluster
	@bash tests/e2e/cluster/cluster.sh down

##@ Gates
check: setup lint types rooms tidy proto-check crds-check dashboards-check ## all static checks
.PHONY: help setup setup-demo catalog clean demo fmt lint types rooms tidy docs proto proto-check crds crds-check console-figure dashboards dashboards-check test test-fast generated sim linearizability kills fuzz argo signing e2e bench images release cluster-up cluster-demo cluster-down check
