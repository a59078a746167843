"""Counts of copies and launches, with meta tensors in the place of a GPU's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
NOTHING = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.detach,
    aten.lift_fresh,
    aten._unsafe_view,
}


class Counting(TorchDispatchMode):
    """Counts what a decode asks of a device, with meta tensors in the place of the device's.

    Meta tensors have shapes and no values. Copies from the host and to it pass the dispatcher as
    they would with a GPU, and so does every operation that would launch a kernel. A download gets
    the `values` for its tensor.

    Attributes:
        uploads: copies from the host; each is one transfer.
        downloads: copies to the host; each waits for the device.
        launches: kernels, copies within the device included.
        names: of the launches, with their counts.
    """

    def __init__(self, values: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self._values = values or (lambda like: torch.ones(like.shape, dtype=like.dtype))
        self.uploads = self.downloads = self.launches = 0
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode these arrive whole
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            self.downloads += 1
            return self._values(args[0]).item()
        if func is aten._to_copy.default:
            to = torch.device(kwargs.get("device") or args[0].device).type
            if args[0].is_meta and to == "cpu":
                self.downloads += 1
                return self._values(args[0]).to(kwargs.get("dtype") or args[0].dtype)
            if not args[0].is_meta and to == "meta":
                self.uploads += 1
                return func(*args, **kwargs)
        if func is aten.copy_.default and args[0].is_meta != args[1].is_meta:
            if args[0].is_meta:
                self.uploads += 1
                return args[0]
            self.downloads += 1
            return args[0].copy_(self._values(args[1]))
        found = func(*args, **kwargs)
        outputs = found if isinstance(found, tuple | list) else (found,)
        on_device = any(isinstance(t, torch.Tensor) and t.is_meta for t in outputs)
        if on_device and not is_view(func) and func.overloadpacket not in NOTHING:
            self.launches += 1
            self.names[func.overloadpacket.__name__] += 1
        return found


def is_view(func: Any) -> bool:
    """Whether an operation only returns another view of its argument."""
    alias = func._schema.returns[0].alias_info if func._schema.returns else None
    return alias is not None and not alias.is_write


def machine_code(kernel: Any, arguments: Iterable[Any], constants: dict[str, Any]) -> bytes:
    """What a Triton kernel is on an H100, with the arguments of a launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(constants)
    options = {"num_warps": constants.pop("num_warps")}
    names = [name for name in kernel.arg_names if name not in constants]
    kinds = [triton.runtime.jit.mangle_type(argument) for argument in arguments]
    signature = dict(zip(names, kinds, strict=True)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return compiled.asm["cubin"]
