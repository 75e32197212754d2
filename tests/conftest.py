"""Settings of the whole suite. tests/jax needs no torch, tests/bridge does; cases.py and oracle.py serve both."""

import os
import shutil
import subprocess

import pytest
from hypothesis import settings

# The kernels' interpreter blocks a thread of XLA's pool for each warpgroup that waits: with as few as two cores, three
# warpgroups would wait for ever. Read when JAX's CPU client starts.
os.environ.setdefault("NPROC", "8")
# Nearly all of the suite's time is XLA compiling small programs. (Level 0 gave NaN for a gradient: jax 0.12.0.1.)
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")

pytest.register_assert_rewrite(
    "acceptance", "acceptance_merge", "acceptance_varlen", "bad_input", "cases", "checks", "fmha_frontend",
    "format_kinds", "gradients", "jax_frontend", "shared_memory", "torch_frontend",
)  # fmt: skip

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


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs():
    """Thousands of programs in one process exhaust its memory mappings, and LLVM aborts."""
    yield
    import jax

    jax.clear_caches()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting and not gpu_seen():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
