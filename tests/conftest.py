"""Settings of the whole suite. tests/jax needs no torch, tests/bridge does; cases.py and oracle.py serve both."""

import os
import shutil
import subprocess

import pytest
from hypothesis import settings

pytest.register_assert_rewrite(
    "acceptance", "bad_input", "cases", "checks", "gradients", "jax_frontend", "torch_frontend"
)

settings.register_profile(
    "suite",
    deadline=None,  # the first example of a shape compiles
    derandomize=os.environ.get("CI") == "true",
    max_examples=int(os.environ.get("HYPOTHESIS_MAX_EXAMPLES", "25")),
)
settings.load_profile("suite")


def gpu_seen() -> bool:
    """Whether an NVIDIA GPU answers, asked without starting JAX or torch."""
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


GPU = gpu_seen()
if not GPU:  # on a CPU nearly all the time goes into compiling; what the programs compute is the same
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not GPU:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
