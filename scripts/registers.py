"""Registers and spills of a decode and its merge, assembled without a GPU.

    pip install --no-deps --target PLUGIN jax-cuda13-plugin jax-cuda13-pjrt    # of the installed jax's version
    python scripts/registers.py PLUGIN [--dim 128] [--group 4] [--page 16] [--tokens 1] [--batch 32] [--keys 1024]

From the root of a clone, with ptxas and a C compiler on the path. Mosaic GPU's compiler asks the driver for nothing but
the device's compute capability, which a library of two functions answers here; the assembled kernel is not loaded.
("Symbols not found" is that it cannot be launched either.) Kernels are lowered as torch's are. PTX and ptxas' own words
are left in the folder that is named.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

DRIVER = """
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int name, int device) { *value = name == 75 ? 9 : 0; return 0; }
"""
"""Attributes 75 and 76 are the compute capability."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("plugin", type=Path, help="folder with jax_plugins/xla_cuda13")
    for name, default in (("dim", 128), ("group", 4), ("page", 0), ("tokens", 1), ("batch", 32), ("keys", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if "libcuda" not in os.environ.get("LD_LIBRARY_PATH", ""):  # read when a process starts
        folder = Path(tempfile.mkdtemp(prefix="registers-"))
        fake = folder / "libcuda"
        fake.mkdir()
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(fake / "libcuda.so.1")]
        subprocess.run(command, input=DRIVER.encode(), check=True)
        os.environ |= {"LD_LIBRARY_PATH": str(fake), "JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_TO": str(folder)}
        os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "PYTHONPATH": "."}
        os.execv(sys.executable, [sys.executable, *sys.argv])
    return assemble(given, Path(os.environ["MOSAIC_GPU_DUMP_TO"]))


def assemble(given: argparse.Namespace, folder: Path) -> int:
    import jax
    import jax.numpy as jnp

    from bridge import _mosaic
    from pallas_kernels import masks
    from pallas_kernels.problem import Problem, build
    from pallas_kernels.program import Target, program, resolve

    compile_ = ctypes.CDLL(str(given.plugin / "jax_plugins/xla_cuda13/xla_cuda_plugin.so")).MosaicGpuCompile
    compile_.argtypes, compile_.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    n, heads, found = given.batch, 2 * given.group, list[Problem]()

    def attend(q: jax.Array, k: jax.Array, lengths: jax.Array, table: jax.Array) -> None:
        counts, mask = [given.tokens] * n, masks.BlockDiagonalCausalWithOffsetPaddedKeysMask
        made = mask.from_seqlens(counts, given.keys, lengths)
        if given.page:
            made = masks.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
                counts, lengths, table, given.page
            )
        found.append(build(q, k, k, made)[0])

    shapes = [(1, n * given.tokens, heads, given.dim), (1, n * given.keys, 2, given.dim)]
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    table = (n, given.keys // (given.page or given.keys))
    structs += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((n,), table)]
    jax.eval_shape(attend, *structs)
    target = Target((9, 0), 132)
    made = program(resolve(found[0], target), target, counted=True)
    for launch in made.launches:
        buffers = [made.buffer(name) for name in launch.reads]
        module = _mosaic.lower(
            launch.kernel.build(), [jax.ShapeDtypeStruct(b.shape, jnp.dtype(b.dtype)) for b in buffers]
        )
        before = set(folder.glob("*.ptxas"))
        compile_(module, len(module))
        text = "".join(path.read_text() for path in set(folder.glob("*.ptxas")) - before)
        used = re.findall(r"\d+ bytes spill \w+|Used \d+ registers", text)
        print(type(launch.kernel).__name__, *used, sep=", ", flush=True)
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
