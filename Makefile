PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
BOOK := .venv-book
SLIDES := .venv-slides
PYTEST := $(PY) -m pytest -n auto --dist loadscope
# In a container one is root, as whom JupyterLab does not start unasked.
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: help start demo real lint quick test test-all chapters book slides release bench
help:  ## list these commands
	@sed -n 's/^\([a-z-]*\):.*  ## /\1|/p' Makefile | awk -F'|' '{ printf "make %-9s %s\n", $$1, $$2 }'

start: $(VENV)/.installed  ## JupyterLab at the first chapter
	$(PY) -m jupyterlab $(AS_ROOT) chapters/ch0_sampling.ipynb

demo: $(VENV)/.installed  ## train PPO and GRPO on the embedded model, before and after
	$(PY) -m utils.course.demo

real: $(VENV)/.installed  ## fetch a real language model (SmolLM2, 135M) and train it, before and after
	$(PY) -m utils.course.real_model

lint: $(VENV)/.tools
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m utils.grading.catalogue

quick: lint  ## lint, types, stale mistakes, and the reference through every check
	$(PY) -m mypy utils solutions
	$(PYTEST) --size quick

test: lint  ## what must hold before a change is sent
	$(PYTEST) --size test

test-all: lint  ## every mistake through every check and in processes apart, every attack, a class of sixty
	$(PYTEST) --size all $(TESTS)

chapters: $(VENV)/.tools  ## rebuild the notebooks, and run those with solutions
	$(PY) -m utils.authoring

book: $(BOOK)/.installed  ## the course as a site, dist/book/index.html, read without a network
	$(BOOK)/bin/python -m utils.authoring.book --repository "$(REPOSITORY)"

slides: $(SLIDES)/.installed  ## the slides of the teaching kit, dist/slides/index.html
	$(SLIDES)/bin/python -m utils.authoring.slides

release: $(VENV)/.tools  ## course bundles and the autograder, into dist/
	$(PY) -m utils.authoring.release

bench: $(VENV)/.tools  ## against TRL, side by side: runs/bench.json
	$(PY) -m utils.bench

$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))" || \
		(echo "Python 3.11 to 3.13 is needed, for example: make PYTHON=python3.12" && exit 1)
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -r $<
	@touch $@

$(VENV)/.tools: requirements-dev.txt $(VENV)/.installed
	$(PY) -m pip install --disable-pip-version-check -r $<
	@touch $@

$(BOOK)/.installed: utils/authoring/book/requirements.txt
	$(PYTHON) -m venv $(BOOK)
	$(BOOK)/bin/python -m pip install --disable-pip-version-check -r $<
	@touch $@

$(SLIDES)/.installed: utils/authoring/slides/requirements.txt
	$(PYTHON) -m venv $(SLIDES)
	$(SLIDES)/bin/python -m pip install --disable-pip-version-check -r $<
	@touch $@
