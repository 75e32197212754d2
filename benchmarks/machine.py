"""The card, asked through the driver alone: no framework is imported and no context is made."""

from __future__ import annotations

import ctypes
import dataclasses

CAPABILITY = (9, 0)
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


@dataclasses.dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]


def gpu() -> Gpu | None:
    """The first visible GPU, or None."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, device, value = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        return None
    if driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(name, len(name), device)
    capability = []
    for attribute in (_MAJOR, _MINOR):
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return Gpu(name.value.decode(), (capability[0], capability[1]))


def refusal() -> str | None:
    """Why the kernels cannot run here, in one line, or None."""
    found = gpu()
    if found is None:
        return "needs an NVIDIA GPU, and none is visible here"
    if found.capability != CAPABILITY:
        major, minor = found.capability
        return f"needs a GPU of compute capability 9.0 (Hopper), found {found.name} with {major}.{minor}"
    return None
