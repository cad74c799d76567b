# Each target sets up what it needs; `make demo` and `make test` are all that a newcomer has to know.
SHELL := /bin/sh
VENV ?= .venv
export PEERLANE_VENV := $(VENV)
export PATH := $(abspath $(VENV))/bin:$(PATH)
RUN := $(VENV)/bin

.PHONY: help demo test lint unit lab lab-test deep docs bench clean setup

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile

demo: ## a lab host, provisioned; an answer from its model; an audit of an 8-GPU guest
	@sh lab/prepare.sh lab
	@$(RUN)/python -m peerlane.lab.demo

test: setup lint unit lab-test ## everything that CI runs: under 25 minutes on 2 cores

setup:
	@sh lab/prepare.sh lab,test

lint: setup ## ruff, mypy --strict, yamllint, ansible-lint (production), shellcheck
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/yamllint --strict .
	$(RUN)/ansible-lint -q
	$(RUN)/shellcheck lab/prepare.sh .ci/run $(shell find roles lab src tests benchmarks -name '*.sh' -not -path 'lab/prepare.sh')

unit: setup ## parsers, verdicts, plans, the command line, docs against code; on every ansible-core that fits here
	$(RUN)/python -m pytest -n auto tests/unit tests/cli
	sh tests/cores.sh

lab: setup ## a lab host to play with: peerlane lab ssh try
	$(RUN)/peerlane lab up try

lab-test: setup ## every role on lab hosts, and the faults
	sh tests/lab.sh

deep: setup ## the real DKMS builds and the long scenarios; about half an hour
	sh tests/lab.sh deep

docs: setup ## regenerate what is generated from the code
	$(RUN)/python docs/generate.py

bench: setup ## the ratios that the docs claim
	@for one in benchmarks/*/run.py; do echo "== $$one"; $(RUN)/python "$$one" || exit 1; done

clean:
	rm -rf $(VENV) .ansible .mypy_cache .pytest_cache .ruff_cache
