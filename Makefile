# Needs a Python 3.12 to 3.14 and nothing else; `make PYTHON=...` names one. Each environment is made once, and again
# when pyproject.toml changes. Where an NVIDIA GPU is seen, the driver's CUDA extra is installed too.
VENV := .venv
VENV_OLDEST := .venv-jax-oldest
JAX_OLDEST := 0.11.2
PYTEST := -m pytest -n 2 --dist loadfile

comma := ,
cuda = $(addprefix $(comma),$(shell sh scripts/cuda_extra.sh))

# $(call install,environment,extras,further requirements)
define install
@$(1)/bin/python -m pip --version >/dev/null 2>&1 || \
	{ python=$$(sh scripts/find_python.sh "$(PYTHON)") && echo "$(1): $$python" && "$$python" -m venv --clear $(1); }
$(1)/bin/python -m pip install --upgrade --upgrade-strategy eager -e ".[$(2)$(cuda)]" $(3)
@touch $@
endef

.PHONY: help demo test test-jax-oldest lint notebooks clean
.NOTPARALLEL:

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-24s %s\n", $$1, $$2 }'

demo: $(VENV)/.demo  ## the main job on a real sentence model, checked
	$(VENV)/bin/python -m bridge.demo

test: lint  ## lint, then the whole suite on the newest jax and torch
	$(VENV)/bin/python $(PYTEST)

test-jax-oldest: $(VENV_OLDEST)/.test  ## the JAX half of the suite on the oldest jax, without torch
	$(VENV_OLDEST)/bin/python $(PYTEST) tests/jax

lint: $(VENV)/.test  ## ruff and mypy
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy

notebooks: $(VENV)/.test  ## run the notebooks and keep their outputs
	$(VENV)/bin/jupyter-execute --inplace notebooks/*.ipynb

clean:  ## remove the environments and everything built
	rm -rf $(VENV) $(VENV_OLDEST) build dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.demo: pyproject.toml
	$(call install,$(VENV),demo)

$(VENV)/.test: pyproject.toml
	$(call install,$(VENV),dev$(comma)demo$(comma)notebooks)

$(VENV_OLDEST)/.test: pyproject.toml
	$(call install,$(VENV_OLDEST),dev,jax==$(JAX_OLDEST) jaxlib==$(JAX_OLDEST))
