"""Exceptions and warnings of both front ends.

Every class satisfies two contracts at once: the kind that the reimplemented library raises (an assertion, a
runtime error) and the kind a Python user expects (ValueError, TypeError), so code written for either keeps working.
"""


class ShapeError(ValueError, AssertionError, RuntimeError):
    """A rank, size, count or length that does not fit; nothing was computed or written."""


class DTypeError(TypeError, ValueError, AssertionError):
    """A dtype that is not accepted, or dtypes that do not go together."""


class ArgumentError(ValueError, AssertionError):
    """A value that is not accepted, or arguments that exclude each other."""


class StaticArgumentError(TypeError, ValueError):
    """A traced value where a Python number is required (scale, softcap, window, capacities)."""


class DeviceError(ValueError, RuntimeError, AssertionError):
    """Tensors on devices that do not go together."""


class UnsupportedError(NotImplementedError, ValueError):
    """No backend serves the problem, or the named one does not; the text lists every reason."""


class GradientError(NotImplementedError, ValueError):
    """A gradient was asked for where none is defined (inference-only arguments, low-bit keys and values)."""


class FallbackWarning(UserWarning):
    """A slower backend than the hardware offers serves the call; given once per reason."""


class ReferenceSizeWarning(UserWarning):
    """`backend="reference"` was asked for a problem far above the size it is meant for."""
