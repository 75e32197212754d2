"""The attention functions as `torch.library` ops, for everything in torch that must see a call, not only run it.

Namespace `pallas_splitk`:

| op                                                        | what it is                                          |
| --------------------------------------------------------- | --------------------------------------------------- |
| `attention`                                               | the `memory_efficient_attention` family: (out, lse) |
| `varlen`                                                  | `varlen_attn`: (out, lse)                           |
| `varlen_out`                                              | `varlen_attn_out`: writes `out`, returns lse        |
| `merge`                                                   | `merge_attentions`: (out, lse or None)              |
| `attention_backward`, `varlen_backward`, `merge_backward` | gradients, None where not wanted                    |

`bridge.fmha` adds four, named fmha_... (its `torch_ops` and `merge`).

Each has a fake implementation (shapes, strides and dtypes of the real one, so tracing runs nothing) and a FLOP formula.
`attention`, `varlen` and `merge` have gradients, once; under autocast the first two cast query, key and value as SDPA
casts them. Masks are flattened into optional tensors and symbolic ints (`bridge._flat.Mask`), so that a compiled
function is traced once for all lengths.

The public functions of `bridge` call the ops where `needed` says so; plain eager inference skips the dispatcher.
"""

from .._needed import needed, watched
from . import _flops
from ._attention import attention
from ._merge import merge
from ._registry import NAMESPACE, ops
from ._varlen import flash_enabled, varlen

_flops.register()

__all__ = ["NAMESPACE", "attention", "flash_enabled", "merge", "needed", "ops", "varlen", "watched"]
