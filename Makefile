PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: demo test test-all start chapters release bench
demo: $(VENV)/.installed  ## train PPO and GRPO on the embedded model, before and after
	$(PY) -m utils.demo

test: $(VENV)/.installed  ## everything that must hold
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pytest -n auto --maxprocesses 4 --dist loadfile

test-all: $(VENV)/.installed  ## and every attack, a class of sixty, every mistake through the sandbox
	TEST_ALL=1 $(PY) -m pytest -n auto --maxprocesses 4 --dist loadfile

start: $(VENV)/.installed  ## JupyterLab at the first chapter
	$(PY) -m jupyterlab chapters/ch0_sampling.ipynb

chapters: $(VENV)/.installed  ## rebuild the notebooks, and run those with solutions
	$(PY) -m utils.authoring

release: $(VENV)/.installed  ## course bundles and the autograder, into dist/
	$(PY) -m utils.authoring.release

bench: $(VENV)/.installed  ## against TRL, generate() and the machine, side by side: runs/bench.json
	$(PY) -m utils.bench

$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))" || \
		(echo "Python 3.11 to 3.13 is needed, for example: make PYTHON=python3.12" && exit 1)
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -r requirements.txt
	@touch $@
