"""Rounding sizes up, so that few of them are compiled."""


def power_of_two(count: int) -> int:
    """The power of two at or above a count; 1 for none."""
    return 1 << max(count - 1, 0).bit_length()
