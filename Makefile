# `make demo PYTHON=python3` uses an interpreter that has torch already, and installs nothing.
PYTHON ?= .venv/bin/python
READY = $(if $(filter .venv/%,$(PYTHON)),.venv/ready)
RUN = PYTHONPATH=python $(PYTHON)
JOBS ?= auto
BIN = $(dir $(shell command -v $(PYTHON)))
CSRC = csrc/*.[ch] csrc/abi/*.h
ASAN = LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=1
# What runs many kernels, and little of the core that other tests don't.
SLOW = kernels emulated emulator_mma attention* *cross_entropy layer_norm rotary reduction nn

.PHONY: demo test test-gpu bench lint fmt asan hostile build clean

demo: build
	$(RUN) examples/01_softmax.py

test: build
	$(RUN) -m pytest tests -m "not gpu" -n $(JOBS)

test-gpu: build
	$(RUN) -m pytest tests -m gpu

bench: build
	$(RUN) benchmarks/run.py $(ARGS)

lint: $(READY)
	$(BIN)ruff check . && $(BIN)ruff format --check . && $(BIN)mypy && $(BIN)clang-format --dry-run -Werror $(CSRC)
	! grep -nE '.{81,}' $(CSRC)

fmt: $(READY)
	$(BIN)ruff check --fix . && $(BIN)ruff format . && $(BIN)clang-format -i $(CSRC)

asan: $(READY)
	TKJIT_SANITIZE=1 $(PYTHON) setup.py -q build --build-base build/asan --build-lib build/asan/lib
	$(ASAN) PYTHONPATH=build/asan/lib $(PYTHON) -m pytest tests -m "not gpu and not package" -n $(JOBS) $(foreach t,$(SLOW),--ignore-glob "tests/test_$(t).py")

hostile: build
	$(RUN) -m pytest tests/test_hostile.py

build: $(READY)
	$(PYTHON) setup.py -q build_ext --inplace

.venv/ready: requirements-dev.txt
	python3 -m venv .venv && .venv/bin/python -m pip install -q -r requirements-dev.txt && touch $@

clean:
	rm -rf build dist python/*.egg-info python/tkjit/*.so
