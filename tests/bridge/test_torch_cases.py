"""The shared cases on the torch front end, against the independent definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cases
import checks
import torch_frontend as frontend

ATTENTION = [*cases.mask_cases(), *cases.dense_cases()]


@pytest.mark.parametrize("case", ATTENTION[::2], ids=str)
def test_attention(case):
    """Every second case: what it adds to the JAX front end is the way there and back, not the arithmetic."""
    checks.check_case(frontend, case, "chunked", seed=11)


@given(cases.draw_case(), st.integers(0, 2**16))
def test_drawn_attention(case, seed):
    checks.check_case(frontend, case, "auto", seed)


@pytest.mark.parametrize("case", cases.varlen_cases(), ids=str)
def test_varlen(case):
    checks.check_varlen(frontend, case, "chunked", seed=13)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("case", cases.merge_cases(), ids=str)
def test_merge(case, as_list):
    checks.check_merge(frontend, case, as_list, seed=14)


def test_split_and_merge():
    checks.check_split_and_merge(frontend, "chunked", seed=15)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name,groups", checks.FORMATS)
def test_garbage_in_formats(name, groups, paged):
    checks.check_garbage_in_formats(frontend, name, groups, paged)
