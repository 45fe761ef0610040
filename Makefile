# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# Environments for tests are installed without compiling: what is imported is compiled then, once, unless a shell forbids it,
# which would make every start of a process four times as long.
unexport PYTHONDONTWRITEBYTECODE
# These fork readers and writers off the process that runs them, which must not have computed anything before; so do
# tests/unit/weights.
FORKING := $(wildcard tests/dist/test_transfer_*.py)
# Whole jobs that take a minute or more, plans of large clusters, and what compiles.
LONG := $(addprefix tests/e2e/test_,failpoints.py learning.py precisions.py deterministic.py claims.py check.py) \
	$(addprefix tests/unit/,plan/test_paper.py plan/test_fallback.py plan/test_search.py simulate/test_large_plans.py rehearse)

.PHONY: train demo test test-long test-dist test-kernels test-view test-monarch test-monarch-long test-cluster test-loggers test-serve test-environments test-oldest test-wheel test-tutorials docs reference soak venv format bench clean

train: .venv/installed
	$(BIN)/llamarl train
	@echo "next: source .venv/bin/activate, then llamarl view runs"

# A minute of training, then its page.
demo: .venv/installed
	test -e runs/demo || $(BIN)/llamarl train schedule.updates=30 evaluate.every=10 snapshots.every=10 --run runs/demo
	$(BIN)/llamarl view runs/demo --open

test: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy & types=$$!; $(BIN)/pytest tests/unit/weights && wait $$types # alone, see FORKING
	$(BIN)/pytest --numprocesses 2 --dist loadfile tests/unit --ignore=tests/unit/weights --ignore=tests/unit/tasks $(addprefix --ignore=,$(LONG))
	$(BIN)/pytest tests/unit/tasks # alone: they look for programs that are left on the whole machine
	$(BIN)/pytest --numprocesses 2 --dist loadfile tests/e2e $(addprefix --ignore=,$(LONG))

# Learning itself, deterministic jobs, processes killed at twenty places, every precision, large plans: ten minutes.
test-long: .venv/dev
	$(BIN)/pytest --numprocesses 2 --dist loadfile $(LONG)

# Executors of several ranks, weights between processes, real kills and stops: eight minutes.
test-dist: .venv/dev
	$(BIN)/pytest $(FORKING)
	$(BIN)/pytest tests/dist $(addprefix --ignore=,$(FORKING))

# The page in a real browser: the system's Chromium, which is installed if it is missing and apt-get can.
CHROMIUM := chromium chromium-browser google-chrome
test-view: .venv/dev
	@[ -n "$$(which $(CHROMIUM))" ] \
		|| { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } \
		|| echo "test-view: no Chromium here, and apt-get cannot install it: the tests of the page are SKIPPED"
	$(BIN)/pytest tests/browser

# Kernels in Triton's interpreter, and compiled for a GPU, on a CPU. Triton is a large download that nobody else needs here.
test-kernels: .venv/dev build/triton
	PYTHONPATH=$(CURDIR)/build/triton $(BIN)/pytest tests/unit/generate/test_attention_interpreted.py tests/unit/model/test_experts_interpreted.py tests/unit/model/test_kernels_compile.py
build/triton:
	$(BIN)/pip install --quiet --no-deps --target $@ 'triton>=3.7,<4'

# The other engine. Monarch brings a package named `tests` and much else, so it has an environment of its own.
MONARCH := .venv-monarch/bin
test-monarch: .venv-monarch/dev
	$(MONARCH)/pytest tests/on_monarch

# Kills, several ranks and learning itself once more, on that engine: five minutes.
test-monarch-long: .venv-monarch/dev
	LLAMARL_TEST_ENGINE=monarch $(MONARCH)/pytest tests/dist/test_kills.py tests/dist/test_ended_by_force.py \
		tests/dist/test_trainer_jobs.py tests/e2e/test_learning.py tests/e2e/test_deterministic.py \
		-k "kills or by_force or several_ranks or accuracy_rise or timing or outside"

# Three hosts on this machine: network namespaces, which need root.
test-cluster: .venv-monarch/dev
	$(MONARCH)/pytest tests/cluster

# Loggers with their real packages, which bring much else (600 MB besides torch's), so they have an environment of their own.
LOGGERS := .venv-loggers/bin
test-loggers: .venv-loggers/dev
	$(LOGGERS)/pytest tests/loggers

# The endpoint with real clients: `openai`, `anthropic`, curl and the harness lm-eval, in an environment of their own.
SERVE := .venv-serve/bin
test-serve: .venv-serve/dev
	$(SERVE)/pytest tests/clients

# Environments of others with their real packages, in an environment of their own; those of verifiers in one more.
ENVIRONMENTS := .venv-environments/bin
test-environments: .venv-environments/dev .venv-verifiers/dev
	$(ENVIRONMENTS)/pytest tests/environments

# What trains and generates, with the oldest torch that is allowed: it compiles in other ways. A large download on some machines.
OLDEST := .venv-oldest/bin
test-oldest: .venv-oldest/dev
	$(OLDEST)/pytest tests/unit/train tests/unit/model tests/unit/generate

# The wheel in an environment with nothing but pip: names on a hub on loopback and an own reward train without a checkout.
test-wheel: .venv/dev
	LLAMARL_TEST_WHEEL=1 $(BIN)/pytest tests/wheel

# Every code block of tutorials and recipes, in order, and what they print: six minutes. One that needs a GPU is skipped.
test-tutorials: .venv/dev
	$(BIN)/pytest --numprocesses 2 -rP tests/tutorials

# The site, into build/site: spelling, then whether pages say what the code says, then the pages; a warning is an error.
DOCS := .venv-docs/bin
docs: .venv-docs/installed
	$(DOCS)/codespell README.md CHANGELOG.md CONTRIBUTING.md docs examples src
	PYTHONPATH=src $(DOCS)/python scripts/docs/check.py
	NO_MKDOCS_2_WARNING=1 $(DOCS)/mkdocs build --strict --quiet

# The pages that are made from the code: settings, commands, families of models.
reference: .venv/installed
	$(BIN)/python scripts/docs/reference.py --write
	$(BIN)/python scripts/docs/families.py --write

# A hundred thousand hostile answers (`HOSTILE=5000` for fewer), hostile programs in every sandbox, ten thousand simulated
# disasters, a kill and a stop at every failpoint, run folders with second owners, full disks, live copies and torn files
# (`ROUNDS=2` for fewer), then half an hour of real kills and stops (`KILLS=20 EVERY=3` for fewer).
soak: .venv/dev
	LLAMARL_HOSTILE=$(or $(HOSTILE),100000) $(BIN)/pytest tests/unit/tasks/test_hostile.py tests/unit/tasks/test_hostile_programs.py
	$(BIN)/python scripts/chaos.py
	$(BIN)/python scripts/soak_failpoints.py
	$(BIN)/python scripts/soak_folders.py --rounds $(or $(ROUNDS),10)
	$(BIN)/python scripts/soak.py --kills $(or $(KILLS),200) --every $(or $(EVERY),5)

venv: .venv/dev

# The pip that comes with an older Python takes twice as long for the rest.
define new_venv
	$(PYTHON) -m venv $(1)
	$(1)/bin/pip install --quiet --disable-pip-version-check --upgrade pip
endef

# PyPI's torch for x86_64 brings gigabytes of CUDA. A machine without a GPU takes the CPU build, if its index can be reached.
CPU_TORCH := https://download.pytorch.org/whl/cpu
TORCH := $(shell sed -n 's/^ *"\(torch[<>=][^"]*\)",*$$/\1/p' pyproject.toml)
define main_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or later is needed; name one: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 2; }
	$(call new_venv,.venv)
	@[ "$$(uname -m)" != x86_64 ] || command -v nvidia-smi > /dev/null || $(BIN)/python -c 'import torch' 2> /dev/null \
		|| $(BIN)/pip install --quiet --disable-pip-version-check --retries 0 --timeout 10 --index-url $(CPU_TORCH) \
			'$(TORCH)' 2> /dev/null \
		|| echo "no GPU here, and $(CPU_TORCH) cannot be reached: taking the torch that pip finds"
endef

# The stamps are newer than pyproject.toml once an install has succeeded, so a changed dependency is installed again.
.venv/installed: pyproject.toml
	$(main_venv)
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

.venv/dev: pyproject.toml
	$(main_venv)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -e '.[dev]'
	touch $@ .venv/installed

.venv-monarch/dev: pyproject.toml
	$(call new_venv,.venv-monarch)
	$(MONARCH)/pip install --quiet --disable-pip-version-check --no-compile -e '.[dev,monarch]'
	touch $@

.venv-loggers/dev: pyproject.toml
	$(call new_venv,.venv-loggers)
	$(LOGGERS)/pip install --quiet --disable-pip-version-check --no-compile -e '.[tensorboard,wandb,trackio,mlflow]' \
		pytest pytest-timeout hypothesis
	touch $@

.venv-serve/dev: pyproject.toml
	$(call new_venv,.venv-serve)
	$(SERVE)/pip install --quiet --disable-pip-version-check --no-compile -e '.[serve]' \
		pytest pytest-timeout hypothesis httpx openai anthropic 'lm_eval[api]' transformers
	touch $@

.venv-environments/dev: pyproject.toml
	$(call new_venv,.venv-environments)
	$(ENVIRONMENTS)/pip install --quiet --disable-pip-version-check --no-compile -e '.[reasoning-gym,verifiers]' \
		pytest pytest-timeout hypothesis
	touch $@

.venv-verifiers/dev: .venv-environments/dev
	$(ENVIRONMENTS)/llamarl env install 'verifiers[openenv,ta]' --at .venv-verifiers
	touch $@

.venv-oldest/dev: pyproject.toml
	$(call new_venv,.venv-oldest)
	$(OLDEST)/pip install --quiet --disable-pip-version-check --no-compile -e '.[dev]' 'torch==2.11.*'
	touch $@

# Docstrings are read, not imported, and llamarl.config needs no torch, so the packages of the extra are enough.
.venv-docs/installed: pyproject.toml
	$(call new_venv,.venv-docs)
	$(DOCS)/pip install --quiet --disable-pip-version-check --no-compile $$($(PYTHON) -c "import tomllib; \
		print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	touch $@

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-monarch .venv-loggers .venv-serve .venv-environments .venv-verifiers .venv-oldest .venv-docs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
