"""Adapters for joining partial results; the contract is in `peers/__init__.py`."""
