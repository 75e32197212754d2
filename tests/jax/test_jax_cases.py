"""Every shared case on the JAX front end, against the independent definition."""

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cases
import checks
import jax_frontend as frontend

BACKENDS = ["chunked", "reference"]
ATTENTION = [*cases.mask_cases(), *cases.dense_cases()]


def on_backends(all_cases):
    """Every case on `chunked`, every second one on `reference` too: nearly all the time is compiling."""
    return [*((case, "chunked") for case in all_cases), *((case, "reference") for case in all_cases[::2])]


@pytest.mark.parametrize("case,backend", on_backends(ATTENTION), ids=str)
def test_attention(case, backend):
    checks.check_case(frontend, case, backend, seed=1)


@pytest.mark.parametrize("case", ATTENTION[::3], ids=str)
def test_garbage_changes_no_bit(case):
    checks.check_garbage(frontend, case, "chunked", seed=2)


@given(cases.draw_case(), st.integers(0, 2**16))
def test_drawn_attention(case, seed):
    checks.check_case(frontend, case, "chunked", seed)


@pytest.mark.parametrize("case,backend", on_backends(cases.varlen_cases()), ids=str)
def test_varlen(case, backend):
    checks.check_varlen(frontend, case, backend, seed=3)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("case", cases.merge_cases(), ids=str)
def test_merge(case, as_list):
    with jax.enable_x64(case.lse_dtype == "float64"):
        checks.check_merge(frontend, case, as_list, seed=4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_split_and_merge(backend):
    checks.check_split_and_merge(frontend, backend, seed=5)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name,groups", checks.FORMATS)
def test_garbage_in_formats(name, groups, paged):
    checks.check_garbage_in_formats(frontend, name, groups, paged)
