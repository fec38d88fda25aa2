# `make demo` and `make test` are all that a fresh machine needs; `make` alone lists the goals.
#
# Each goal asks tools/python for an interpreter that has the modules it names: the `python3` at hand when that has
# them, else .venv, which is then made and filled.

SHELL := /bin/bash
.PHONY: help demo test check fix bench clean

export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

DEMO := examples/residual_stats.coda
DEMO_DIMS := M=8192,A=4096,D=4096
PYTEST_ARGS ?=

help:  ## list the goals
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/'

demo:  ## lower an example at Llama-3-8B sizes to a .so, then run and verify it
	@python=$$(tools/python torch lark sympy) && mkdir -p .demo && set -x \
	&& $$python -m coda explain $(DEMO) --dims $(DEMO_DIMS) \
	&& $$python -m coda lower $(DEMO) --dims $(DEMO_DIMS) -o .demo/residual_stats.so \
	&& $$python -m coda run .demo/residual_stats.so --dims $(DEMO_DIMS)

test:  ## run the tests (those marked gpu skip without a GPU); PYTEST_ARGS="-k name" narrows them
	@python=$$(tools/python torch lark sympy pytest hypothesis) && $$python -m pytest $(PYTEST_ARGS)

check:  ## lint, format and types
	@python=$$(tools/python torch lark sympy ruff mypy) && set -x \
	&& $$python -m ruff check && $$python -m ruff format --check && $$python -m mypy

fix:  ## repair what can be repaired: lint and format
	@python=$$(tools/python ruff) && $$python -m ruff check --fix; $$python -m ruff format

bench:  ## measure on the GPU; writes one JSON file into benchmarks/results
	@python=$$(tools/python torch lark sympy) && $$python -m benchmarks.build .bench && $$python -m benchmarks.run && $$python -m benchmarks.table

clean:  ## remove what the goals above make, except .venv
	rm -rf .demo build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
