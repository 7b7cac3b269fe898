# `make` lists the targets. Variables: VENV, PYTHON, TORCH (an exact requirement, such as TORCH=torch==2.12.1).
SHELL := /bin/sh
.DEFAULT_GOAL := help

VENV   = .venv
PYTHON = python3
TORCH  =
JOBS   = 2

PY     = $(VENV)/bin/python
PIP    = $(PY) -m pip install --disable-pip-version-check
STAMP  = $(VENV)/.stamp
RANGE  = torch>=2.11,<2.16
OLDEST = 2.11.0
NEWEST = 2.15.0

.PHONY: help .venv demo test compat core bench wheel clean

help: ## list the targets
	@sed -n 's/^\([a-z.]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

.venv: $(STAMP) ## the environment, with shardc in it (made anew when pyproject.toml changes)

# Which torch: the one asked for in TORCH; else the system's, where it is in range and sees a GPU; else a new one: as pip
# chooses where there is an NVIDIA GPU, and 2.13.0 where there is none (a bare `torch` would be gigabytes of CUDA). It is then pinned, so that no other package replaces it.
SYSTEM_TORCH = import torch; v = tuple(map(int, torch.__version__.split(".")[:2])); \
	raise SystemExit(not ((2, 11) <= v <= (2, 15) and torch.cuda.is_available()))

$(STAMP): pyproject.toml
	@if [ -x $(PY) ]; then :; \
	elif [ -z '$(TORCH)' ] && $(PYTHON) -c '$(SYSTEM_TORCH)' 2>/dev/null; \
	then $(PYTHON) -m venv --system-site-packages $(VENV); \
	else $(PYTHON) -m venv $(VENV); fi
	@if $(PY) -c 'import torch' 2>/dev/null; then :; \
	elif [ -n '$(TORCH)' ]; then $(PIP) '$(TORCH)'; \
	elif nvidia-smi >/dev/null 2>&1; then $(PIP) '$(RANGE)'; \
	else $(PIP) torch==2.13.0; fi
	@$(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(VENV)/constraints.txt
	$(PIP) --quiet --constraint $(VENV)/constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP) ## train a small GPT on 4 processes (on GPUs: one a GPU); a few minutes on 2 cores
	$(PY) -m torch.distributed.run --standalone \
	    --nproc-per-node $$($(PY) -c 'import torch; print(torch.cuda.device_count() or 4)') examples/train_gpt.py

test: $(STAMP) ## ruff, mypy, pytest
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -q -n $(JOBS) --dist worksteal

compat: ## the core tests on the oldest and the newest torch, each in its own environment (5 GB each)
	@status=0; for version in $(OLDEST) $(NEWEST); do \
	    if $(MAKE) --no-print-directory core VENV=.venv-$$version TORCH=torch==$$version; \
	    then echo "torch $$version: passed"; else echo "torch $$version: FAILED"; status=1; fi; \
	done; exit $$status

core: $(STAMP) ## the tests that neither compile with Inductor nor start processes
	$(PY) -m pytest -q -n $(JOBS) -m 'not slow and not gpu'

bench: $(STAMP) ## the measurements in examples/bench, one after the other
	@for script in $(sort $(wildcard examples/bench/*.py)); do echo "== $$script"; $(PY) $$script || exit 1; done

# The scratch environment sees the site-packages of $(VENV) through a .pth file, so torch is not installed again; the
# editable shardc in there stays invisible, for .pth files are not read through .pth files.
wheel: $(STAMP) ## build a wheel, install it away from the checkout, import it from there
	@rm -rf build dist
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@set -e; scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; \
	$(PYTHON) -m venv "$$scratch/venv"; \
	site=$$("$$scratch/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	$(PY) -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' > "$$site/torch.pth"; \
	"$$scratch/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps dist/*.whl; \
	cd "$$scratch"; venv/bin/python -c 'import passes, shardc; \
	assert all(m.__file__.startswith("'"$$scratch"'") for m in (passes, shardc)), (passes, shardc); \
	from importlib.metadata import files; \
	assert sum(f.name == "py.typed" for f in files("shardc")) == 2, "py.typed is missing"; \
	print("imported", passes.__file__, shardc.__file__)'

clean: ## remove what was built; the environments stay
	rm -rf build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find passes shardc tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
