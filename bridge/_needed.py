"""Whether a call must go through the `torch.library` ops, asked before each one: so it must cost next to nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

# No public name of torch answers these; each is one read of a thread-local.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_autocast = torch._C._is_any_autocast_enabled

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def watched() -> bool:
    """Whether something in torch has to see every call, whatever its tensors.

    A compiler, a dispatch or function mode (fake tensors, FLOP counting, a default device), a `torch.func` transform,
    or autocast.
    """
    return bool(
        torch.compiler.is_compiling()
        or _dispatch_modes()
        or _function_modes()
        or _autocast()
        or _transforms() is not None
    )


def needed(tensors: Iterable[Any]) -> bool:
    """Whether a call of these tensors must go through the ops: it is `watched`, a gradient is wanted, or a tensor is
    a meta tensor or a subclass of Tensor (a fake one, for instance). `tensors` may hold None and formats.
    """
    if watched():
        return True
    grad = torch.is_grad_enabled()
    for x in tensors:
        if type(x) in _PLAIN:
            if x.is_meta or (grad and x.requires_grad):
                return True
        elif x is not None and (
            isinstance(x, torch.Tensor)
            or (hasattr(x, "opened") and needed(part for part in vars(x).values() if isinstance(part, torch.Tensor)))
        ):
            return True
    return False
