"""A device of PyTorch that has no values, for the code that a GPU runs: autocast, FSDP2 with its streams, and compilation.

Tensors of the device are fake ones. The host cannot read them, and what it makes from numbers is a copy of ordinary memory, which
is recorded. `simulated_gpu` changes PyTorch for the rest of the process, so call it in a process of its own.
"""

from __future__ import annotations

import functools
import os
import traceback
from contextlib import ExitStack, contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from credit_like.nn import constants
from credit_like.ops import wide
from credit_like.ops.cpu import policy
from credit_like.parallel.observe import wraps_others
from credit_like.plan.meter import attention_as_on_gpu
from credit_like.state import Sample

NAME = "gpu"
IN_BFLOAT16 = (
    "linear matmul mm addmm bmm baddbmm conv2d conv_transpose2d.input convolution scaled_dot_product_attention"
)
IN_FLOAT32 = (
    "layer_norm group_norm softmax.int log_softmax.int sum sum.dim_IntList exp log pow.Tensor_Scalar rsqrt norm.Scalar"
)
"""Some of the operations that autocast computes in each precision on CUDA."""
_waited: list[str] = []
"""What the host waited for besides tensors: streams and events."""
_modes: list[FakeTensorMode] = []
"""Those of the devices that exist, of which the last is in use."""


class _Stream:
    def __init__(self, *_args, **_options):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or _Event()

    def synchronize(self):
        _waited.append("Stream.synchronize")


class _Event:
    def __init__(self, *_args, **_options):
        pass

    def record(self, stream=None):
        return self

    def wait(self, stream=None):
        pass

    def synchronize(self):
        _waited.append("Event.synchronize")


class _Module(_DummyBackendModule):
    """What PyTorch and FSDP2 ask `torch.cuda` for."""

    Stream, Event = _Stream, _Event

    def current_stream(self, device=None):
        return _Stream()

    @contextmanager
    def stream(self, stream):
        yield

    @contextmanager
    def device(self, device):
        yield

    def set_device(self, device):
        pass

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]

    def get_rng_state(self, device=None):
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state, device=None):
        pass

    def synchronize(self, device=None):
        _waited.append("synchronize")


def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    """Return a fake tensor where torch makes one of the device outside of the mode, as FSDP2 does when it wraps a unit."""
    with _modes[-1]:
        return torch.empty(size, dtype=dtype, device=device)


@functools.cache
def _registered() -> tuple[torch.library.Library, ...]:
    """Register the device, and autocast for it; the libraries must be kept."""
    _setup_privateuseone_for_python_backend(NAME, _Module())
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(operation, dtype):
        def computed(*args, **kwargs):
            def narrowed(x):
                wanted = (
                    isinstance(x, torch.Tensor) and x.dtype in (torch.float32, torch.bfloat16) and x.device.type == NAME
                )
                return x.to(dtype) if wanted else x

            with torch._C._ExcludeDispatchKeyGuard(key):
                args, kwargs = tree_map(narrowed, (args, kwargs))
                return operation(*args, **kwargs)

        return computed

    for names, dtype in ((IN_BFLOAT16, torch.bfloat16), (IN_FLOAT32, torch.float32)):
        for name in names.split():
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, cast(operation, dtype), "AutocastPrivateUse1")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    return others, library


def _where(name: str) -> str:
    """Return the name of an operation, and the line of the package that asks for it."""
    lines = [frame for frame in traceback.extract_stack() if f"{os.sep}credit_like{os.sep}" in frame.filename]
    return f"{name} {lines[-1].filename}:{lines[-1].lineno}" if lines else name


class Work(TorchDispatchMode):
    """Sees every operation; `waits` are those for which the host of a GPU would wait, with the line that asks for each.

    Reading a value, and copies between the device and memory that is not pinned. Operations whose result has a shape that
    depends on values, such as `nonzero`, fail.
    """

    def __init__(self, pinned):
        super().__init__()
        self.pinned = pinned
        self.waits: list[str] = []

    @classmethod
    def ignore_compile_internals(cls):
        return True  # or nothing would be compiled inside

    def __enter__(self):
        _waited.clear()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.waits += _waited

    @torch._disable_dynamo
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if wraps_others(types):
            return NotImplemented
        name = func.name().partition("::")[2].partition(".")[0]
        if name == "_local_scalar_dense" and isinstance(args[0], FakeTensor) and args[0].constant is None:
            self.waits += [_where(name)] * (args[0].device.type == NAME)
            return {torch.bool: True}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if name == "_to_copy":
            # With tensors that have values torch would compute in earnest, small ones made of numbers among them.
            fake = args[0] if isinstance(args[0], FakeTensor) else _modes[-1].from_tensor(args[0])
            fake.constant = None
            args = (fake, *args[1:])
        result = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if any(x.device.type == NAME for x in (*given, *made)) and func.namespace != "c10d":
            # A tensor of one number that is used where it is goes with the kernel as an argument.
            copies = name in ("_to_copy", "copy_", "_foreach_copy_")
            ours = [x for x in (*given, *made) if x.device.type == "cpu" and (x.dim() or copies)]
            self.waits += [_where(name) for x in ours if x.untyped_storage()._cdata not in self.pinned]
        return result


class Gpu:
    """The device, and what happens on it."""

    def __init__(self):
        self.device = torch.device(NAME, 0)
        self.pinned = {}
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def in_pinned_memory(self, sample: Sample) -> Sample:
        """Return a sample of the loader, which is in pinned memory."""
        for tensor in sample.tensors():
            storage = tensor.untyped_storage()
            self.pinned[storage._cdata] = storage
        return sample

    def watched(self) -> Work:
        return Work(self.pinned)


@contextmanager
def simulated_gpu():
    """Yield the device; code that asks for the CPU's forms gets those of a GPU."""
    _registered()
    gpu = Gpu()
    made, swap = torch.tensor, torch.utils.swap_tensors

    def tensor(values, *, dtype=None, device=None, requires_grad=False, **_):
        host = made(values, dtype=dtype)
        return host.to(device or host.device).requires_grad_(requires_grad)

    def pin_memory(x, device=None):
        copy = x.clone()
        storage = copy.untyped_storage()
        gpu.pinned[storage._cdata] = storage
        return copy

    with ExitStack() as stack:
        _modes.append(gpu.mode)
        stack.callback(_modes.pop)
        stack.enter_context(policy.disabled())
        stack.enter_context(attention_as_on_gpu())
        constants._cached.cache_clear()
        stack.callback(constants._cached.cache_clear)
        for owner, name, value in (
            (torch, "tensor", tensor),
            (
                torch.Tensor,
                "new_tensor",
                lambda x, data, **options: tensor(data, **{"dtype": x.dtype, "device": x.device} | options),
            ),
            (torch.Tensor, "pin_memory", pin_memory),
            (wide, "applies", lambda _x, weights, stride: wide.suits(weights, stride)),
            (constants, "detect_fake_mode", lambda: None),  # a constant of the device is made once
            (torch.utils, "swap_tensors", lambda x, y: x.device == y.device or swap(x, y)),  # fails where nothing moves
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield gpu
