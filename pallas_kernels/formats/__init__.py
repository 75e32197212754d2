"""Low-bit formats of keys and values, and caches that hold them.

`SeedInt4` and `SeedFp8` are the packed rows of MSLK's triton_splitk attention, bit for bit; `Fp8`, `Int8` and `Int4`
are laid out for the copy engine. `quantize` makes any of them, `from_seed` and `to_seed` move bits between the two
kinds, `KVCache` appends tokens. All are pytrees, and all of it can be traced.
"""

from .base import Component, KVFormat
from .cache import KVCache, components, target_rows, write_rows
from .convert import from_seed, to_seed
from .encode import encode_rows, quantize
from .native import Fp8, Int4, Int8
from .seed import SeedFp8, SeedInt4

__all__ = [
    "KVFormat",
    "SeedInt4",
    "SeedFp8",
    "Fp8",
    "Int8",
    "Int4",
    "quantize",
    "from_seed",
    "to_seed",
    "KVCache",
    "encode_rows",
    "target_rows",
    "write_rows",
    "components",
    "Component",
]
