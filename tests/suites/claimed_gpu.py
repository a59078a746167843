"""A GPU that is not there: tensors that claim to be on `cuda`, and are computed on the CPU.

Values are right. What CUDA refuses is refused: an operation on tensors of two devices, `numpy()` of
a tensor that was not copied to the host, its address, which native code could read here, and random
numbers from a generator of another device.
A CUDA graph runs its computation again, and no Triton kernel is compiled.
"""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
import torchgen
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from recsys import kernels
from recsys.models import graphs

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
COPIES = {aten.copy_, aten._copy_from, aten._foreach_copy_}  # from one device to another
# CUDA takes from the host some indices, and as a value a tensor with no dimension, if torch's list
# of operations does not have a check that all tensors are on one device.
HOST_INDICES = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
DEVICE_INDICES = {
    aten.masked_fill: 1, aten.masked_fill_: 1, aten.index_fill: 2, aten.index_fill_: 2,
}  # fmt: skip
OPERATIONS = Path(torchgen.__file__).with_name("packaged") / "ATen/native/native_functions.yaml"
UNCHECKED = re.compile(r"^- func: ([\w.]+)\((?:.*\n(?!- ))*  device_check: NoCheck", re.MULTILINE)
HOST_VALUES = {f"aten.{name}" for name in UNCHECKED.findall(OPERATIONS.read_text("utf-8"))}

DEVICE_ANSWERS = {Tensor.device: GPU, Tensor.is_cuda: True, Tensor.is_cpu: False}

# Libraries that compare addresses when they save weights, and read nothing there.
COMPARE_ADDRESSES = {"transformers", "safetensors"}


class ClaimedMemory:
    """The memory that claims to be on the GPU. A view, `detach()` and `data` share it.

    Attributes:
        operations: number of operations that were run there.
    """

    def __init__(self):
        self.operations = 0
        self._known = {}  # address of a storage -> a weak reference, so that it is not used again
        self._next_sweep = 1 << 12
        self._thread = threading.local()

    def __contains__(self, tensor):
        return _address(tensor) in self._known

    def put(self, tensors, *, on_gpu=True):
        """Say where the memory of tensors is; those without any, as of `meta`, stay as they are."""
        for tensor in tensors:
            address = _address(tensor)
            if not on_gpu:
                self._known.pop(address, None)
            elif address and address not in self._known:
                self._known[address] = StorageWeakRef(tensor.untyped_storage())
        if len(self._known) > self._next_sweep:
            known = {key: ref for key, ref in list(self._known.items()) if not ref.expired()}
            self._known, self._next_sweep = known, 2 * len(known) + (1 << 12)

    @property
    def makes(self):
        """Whether the function of torch that runs in this thread makes its own tensors here."""
        return getattr(self._thread, "makes", False)

    @contextmanager
    def making(self, on_gpu):
        """Run a function of torch, whose own tensors are where its arguments are."""
        before, self._thread.makes = self.makes, on_gpu
        try:
            yield
        finally:
            self._thread.makes = before


def _address(tensor):
    """What tensors that share memory have in common; 0 for a tensor that is not on the CPU."""
    with torch._C.DisableTorchFunction():
        if not tensor.is_cpu or tensor.layout != torch.strided:
            return 0
        return tensor.untyped_storage()._cdata


# Of the process: what was copied to the GPU is often kept, as a trie's tensors are.
MEMORY = ClaimedMemory()


def _tensors(values):
    """The tensors in tuples, lists and dictionaries; torch's own walk takes most of a test."""
    found, rest = [], [values]
    while rest:
        value = rest.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            rest.extend(value)
        elif isinstance(value, dict):
            rest.extend(value.values())
    return found


class _Operations(TorchDispatchMode):
    """Refuses mixtures and says where results are, in backward passes as well."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given, kind = _tensors((args, kwargs)), func.overloadpacket
        there = [tensor in MEMORY for tensor in given]
        on_gpu = any(there)
        if on_gpu and kind not in COPIES and not all(there):
            _refuse_mixtures(func, args, kwargs, given)
        asked = kwargs.get("device")
        if asked is not None and asked.type == "cuda":
            kwargs, on_gpu = {**kwargs, "device": CPU}, True
        before = {_address(tensor) for tensor in given}
        found = func(*args, **kwargs)
        if on_gpu or (not given and MEMORY.makes):
            MEMORY.operations += 1
            MEMORY.put(tensor for tensor in _tensors(found) if _address(tensor) not in before)
        return found


def _refuse_mixtures(func, args, kwargs, given):
    kind = func.overloadpacket
    there = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.is_write or place == DEVICE_INDICES.get(kind)
    ]
    takes_values = str(func).removesuffix(".default") in HOST_VALUES
    if kind in HOST_INDICES and args[0] in MEMORY:
        given = _tensors((args[0], args[2:]))
    for tensor in given:
        value = takes_values and tensor.dim() == 0
        value = value and not any(tensor is other for other in _tensors(there))
        if _address(tensor) and tensor not in MEMORY and not value:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{GPU} and {CPU}! ({func} of {[tuple(t.shape) for t in given]})"
            )


class _Generator(torch.Generator):
    """A generator that claims to be on the device that it was made for."""

    def __new__(cls, device=CPU):
        return super().__new__(cls, CPU)

    def __init__(self, device=CPU):
        self.claimed = torch.device(device)

    @property
    def device(self):
        return self.claimed


class _Names(TorchFunctionMode):
    """Answers what Python asks about devices, and moves tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__" and func.__self__ not in DEVICE_ANSWERS:
            return func(*args)  # a shape or a view
        on_gpu = any(tensor in MEMORY for tensor in _tensors((args, kwargs)))
        if name in ("to", "cpu", "cuda"):
            return _move(args[0], name, *args[1:], **kwargs)
        if name == "type_as" or (name == "as_tensor" and isinstance(args[0], Tensor)):
            return _move(args[0], "to", *args[1:], **kwargs)
        if name == "__get__":
            return DEVICE_ANSWERS[func.__self__] if on_gpu else func(*args)
        if name == "__set__" and func.__self__ is Tensor.grad:
            if len({tensor in MEMORY for tensor in _tensors(args)}) > 1:
                raise RuntimeError("a gradient has to be on the same device as its tensor")
            return func(*args)
        if on_gpu and name == "get_device":
            return GPU.index
        if on_gpu and name in ("numpy", "__array__"):
            raise TypeError(
                f"can't convert {GPU} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        if on_gpu and name == "data_ptr" and _caller() not in COMPARE_ADDRESSES:
            raise RuntimeError(f"an address on {GPU} was asked for, which native code cannot read")
        asked = kwargs.get("device")
        if asked is not None:
            asked = GPU if isinstance(asked, int) else torch.device(asked)
            on_gpu = asked.type == "cuda"
            kwargs["device"] = CPU if on_gpu else asked
        generator = kwargs.get("generator")
        if generator is not None and (generator.device.type == "cuda") != on_gpu:
            raise RuntimeError(f"Expected a {asked!r} generator but found {generator.device!r}")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        with MEMORY.making(on_gpu):
            found = func(*args, **kwargs)
        if asked is not None or func in (Tensor.new_tensor, Tensor.__deepcopy__):
            before = {_address(tensor) for tensor in _tensors((args, kwargs))}
            made = [tensor for tensor in _tensors(found) if _address(tensor) not in before]
            MEMORY.put(made, on_gpu=on_gpu)
        return found


def _caller():
    """The package whose function called what a mode sees."""
    return sys._getframe(2).f_globals["__name__"].partition(".")[0]


def _move(tensor, name, *positional, **options):
    """`to`, `cpu` and `cuda`; to another device only by a copy."""
    device = other = None
    if name == "to":
        names = ["device", "dtype", "non_blocking", "copy"]
        if positional and isinstance(positional[0], torch.dtype):
            names = names[1:]
        elif positional and isinstance(positional[0], Tensor):
            names = ["other", *names[2:]]
        options |= dict(zip(names, positional, strict=False))
        other, device = options.pop("other", None), options.pop("device", None)
    else:
        device, options = CPU if name == "cpu" else GPU, {}
    if other is not None:
        device, options["dtype"] = GPU if other in MEMORY else other.device, other.dtype
    dtype, on_gpu = options.pop("dtype", None) or tensor.dtype, tensor in MEMORY
    to_gpu = on_gpu
    if device is not None:
        device = torch.device(device)
        if not {device.type, tensor.device.type} <= {"cpu", "cuda"}:
            return tensor.to(device, dtype, **options)
        to_gpu = device.type == "cuda"
    if to_gpu == on_gpu:
        return tensor.to(dtype, **options)
    return _Moved.apply(tensor, dtype, to_gpu)


class _Moved(torch.autograd.Function):
    """A copy on the other device, in some type; its gradient goes back."""

    @staticmethod
    def forward(ctx, tensor, dtype, on_gpu):
        ctx.back = tensor.dtype, not on_gpu
        moved = tensor.detach().to(dtype, copy=True)
        MEMORY.put([moved], on_gpu=on_gpu)
        return moved

    @staticmethod
    def backward(ctx, gradient):
        dtype, on_gpu = ctx.back
        moved = gradient.to(dtype, copy=True)
        MEMORY.put([moved], on_gpu=on_gpu)
        return moved, None, None


# What torch.cuda says of the GPU, and what does nothing on it.
_ANSWERS = {
    "is_available": True, "device_count": 1, "current_device": 0, "is_bf16_supported": False,
    "is_current_stream_capturing": False, "get_device_name": "claimed", "is_initialized": True,
    "get_device_capability": (8, 0), "mem_get_info": (1 << 34, 1 << 34), "synchronize": None,
    "empty_cache": None, "set_device": None, "set_rng_state": None, "manual_seed_all": None,
}  # fmt: skip


@contextmanager
def claimed_gpu() -> Iterator[ClaimedMemory]:
    """Let `torch.cuda` have a GPU, in this thread and in those that start here."""
    run_thread, run_backward = threading.Thread.run, torch.autograd._engine_run_backward

    def run(thread):
        with _Operations(), _Names():
            run_thread(thread)

    def backward(*args, **kwargs):
        # Functions in Python of a backward pass ask about devices too.
        with _Names(), MEMORY.making(any(tensor in MEMORY for tensor in _tensors(args))):
            return run_backward(*args, **kwargs)

    with ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, a=answer, **__: a))
        for place, name, value in (
            (torch.cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8)),
            (torch.cuda, "device", lambda *_: nullcontext()),
            (torch, "Generator", _Generator),
            (torch.autograd, "_engine_run_backward", backward),
            (threading.Thread, "run", run),
            (graphs, "CudaCapture", lambda device: graphs.run_again),
            (kernels, "find_spec", lambda name: None),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        for forget in (kernels.find_kernels.cache_clear, _forget_accelerator):
            forget()
            stack.callback(forget)
        stack.enter_context(_Operations())
        stack.enter_context(_Names())
        yield MEMORY


def _forget_accelerator():
    """The next `Accelerator()` chooses its device anew."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
