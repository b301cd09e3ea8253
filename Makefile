# Two commands set everything up: `make demo` and `make test`; both begin with `make install`.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test parity exact lint chaos marks clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "trainwright needs Python 3.11 or newer; name one with make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[train,dev]' --constraint constraints.txt
	@touch $@

demo: install
	$(BIN)/trainwright demo

test: install
	$(BIN)/python -m pytest

parity: install
	$(BIN)/python -m pytest --all-cases tests/cpu/test_parity.py tests/cpu/test_curves.py

exact: install
	$(BIN)/python -m pytest --all-cases tests/cpu/test_exact.py tests/cpu/test_peak.py
	$(BIN)/python tests/cpu/exact_runs.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

chaos: install
	$(BIN)/python benchmarks/survival

marks: install
	$(BIN)/python benchmarks/marks.py

clean:
	rm -rf .venv out
