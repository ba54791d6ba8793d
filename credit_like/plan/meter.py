"""Meter the live memory, operations, memory traffic and collectives of a process.

The meter sees every operation that reaches a kernel, on real and on fake tensors, and changes no result. Sizes are in
bytes; operations are floating-point operations (a multiply-add counts as two).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, register_flop_formula

from credit_like.parallel.observe import Message, kind_of, message, wraps_others
from credit_like.parallel.shards import local
from credit_like.parallel.trace import tensors_of
from credit_like.plan.events import Free, Start, Trace, Wait
from credit_like.plan.machine import Arithmetic, Piece
from credit_like.plan.replay import Arguments, Replay

aten = torch.ops.aten

GATHERED, COMMUNICATION, GRADIENTS, ACTIVATIONS = "gathered parameters", "communication", "gradients", "activations"
DYNAMIC = (GRADIENTS, GATHERED, COMMUNICATION, ACTIVATIONS)
"""Uses of storages that are allocated within a step; the operations on a storage determine its use."""

# Operations with which FSDP writes gathered parameters, and with which it collects the gradients of a unit.
_SPLIT_OUT = ("fsdp::split_with_sizes_copy", "aten::split_with_sizes_copy")
_COLLECT = ("fsdp::chunk_cat", "aten::_chunk_cat")
_COPY_IN = "fsdp::all_gather_copy_in"
# Scopes that FSDP names for the profiler: where it gathers, has copied what it gathered, reduces, and waits.
_BEGIN, _GATHER, _COPY_OUT = "FSDP::root_pre_forward", "FSDP::all_gather", "FSDP::all_gather_copy_out"
_REDUCE, _REDUCED = "FSDP::post_backward_reduce", "FSDP::post_backward_rs_wait"
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_DEVICE = torch.ops.prim.device.default
_PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward)
_ALLOCATE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_")
_NO_TRAFFIC = (*_ALLOCATE, "detach", "_local_scalar_dense", "wait_tensor", "device", "promote_types")

# torch counts the products of MKL; those of oneDNN have no formula there.
_BY_ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
if _BY_ONEDNN is not None and _BY_ONEDNN not in flop_registry:

    @register_flop_formula(_BY_ONEDNN)
    def _linear_flops(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
        return 2 * x.numel() * weight[0]


class Meter(TorchDispatchMode):
    """Dispatch mode that counts every operation inside `with Meter() as meter:`.

    `peak` is the largest number of bytes, allocated inside, that were live at once; `parts` divides them by use. Each
    entry of `messages` counts equal collectives. `work` holds operations and collectives in order. If the host reads the
    value of a fake tensor (is the mask empty?), it gets 1 or True.
    """

    def __init__(self, replay: Replay | None = None) -> None:
        super().__init__()
        self.replay = replay
        self.live = 0
        self.peak = 0
        self.by_part: Counter[str] = Counter()
        self.parts: dict[str, int] = dict.fromkeys(DYNAMIC, 0)
        self.work = Trace()
        self.messages: Counter[Message] = Counter()
        self._known: dict[int, tuple[Any, int, str]] = {}
        self._resize: Any = None
        self._started = 0
        self._pending: dict[int, tuple[int, bool]] = {}
        """Storages that a collective writes, until its result is needed: its number, and whether it is an exchange."""
        self._scopes: list[str] = []
        self._reduction = 0
        """Number of the last reduce-scatter."""
        self._packed = 0
        """Number of parameters or gradients that FSDP has packed for its next collective."""
        self._kinds: dict[Any, tuple[bool, Callable[..., int] | None]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled under a meter, so guards for it would only cost time."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if wraps_others(types):
            return NotImplemented
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return args[0].device if func is _DEVICE and isinstance(args[0], FakeTensor) else func(*args, **kwargs)
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor) and args[0].constant is None:
            return {torch.bool: True}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        if func.namespace == "profiler":
            self._scope(args)
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        if self.replay is not None and func.namespace in ("aten", "fsdp"):
            return self._replayed(self.replay, func, args, kwargs)
        out = func(*args, **kwargs)
        self._note(func, args, kwargs, out)
        return out

    def _replayed(self, replay: Replay, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run and count an operation, or repeat its cached results and counts."""
        given = Arguments(func, args, kwargs, replay.mode)
        recipe = None if given.key is None else replay.recipes.known.get(given.key)
        if recipe is None:
            out = func(*args, **kwargs)
            piece = self._note(func, args, kwargs, out)
            if given.key is not None:
                replay.learn(given, Arguments(func, args, kwargs, replay.mode), out, piece)
            return out
        results = replay.repeat(recipe, given.tensors)
        outs = [result for result in results if result is not None]
        self._own(outs, ACTIVATIONS)
        self._retag(func, args, kwargs)
        if recipe.piece is not None:
            self._add_work(recipe.piece, self._behind(given.tensors, outs))
        return recipe.kind(results) if recipe.kind else results[0]

    # ---- operations and messages -------------------------------------------------------------------------------------

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Piece | None:
        """Count an operation; return what it adds to `work`, with TensorFloat-32 wherever it may apply."""
        kind = kind_of(func)
        outs = tensors_of(out)
        if kind is not None:
            self._own(outs, COMMUNICATION if kind != "all-reduce" else ACTIVATIONS)
            self._start(message(kind, func, args, kwargs, out), func, args, outs)
            if func.namespace == "c10d":
                self._move(tensors_of(args), COMMUNICATION)
            return None
        self._own(outs, ACTIVATIONS)
        self._retag(func, args, kwargs)
        moves, count = self._about(func)
        ins = tensors_of((args, kwargs)) if moves or func is _WAIT else []
        behind = self._behind(ins, outs)
        if not moves:
            return None
        flops = count(*args, **kwargs, out_val=out) if count else 0
        piece = _arithmetic(func, ins), int(flops), sum(map(_bytes, ins)) + sum(map(_bytes, outs))
        self._add_work(piece, behind)
        return piece

    def _add_work(self, piece: Piece, behind: int) -> None:
        """Append an operation, in TensorFloat-32 only where torch has been told to use it."""
        arithmetic, flops, traffic = piece
        if arithmetic == "tf32" and torch.get_float32_matmul_precision() == "highest":
            arithmetic = "wide"
        self.work.add(arithmetic, flops, traffic, behind)

    def _start(self, sent: Message, func: Any, args: tuple[Any, ...], outs: list[Tensor]) -> None:
        """Count a collective, and note what will hold its result."""
        self.messages[sent] += 1
        c10d = func.namespace == "c10d"
        written = tensors_of(args[0]) if c10d else outs
        behind = self._behind(tensors_of(args), written)
        scope = self._scopes[-1] if self._scopes else ""
        # Asynchronous is the default of these operations, whose only truth value this is.
        blocks = c10d and next((not value for value in args if isinstance(value, bool)), False)
        gathers = scope.startswith(_GATHER)
        packed = self._packed if gathers or scope.startswith(_REDUCE) else 0
        self._packed -= packed
        self.work.append(
            Start(sent.kind, _compact(sent.ranks), sent.bytes, sent.waits, behind, gathers, blocks, packed)
        )
        self._started += 1
        if sent.kind == "reduce-scatter":
            self._reduction = self._started
        for tensor in written:
            if (storage := _storage(tensor)) is not None:
                self._pending[storage._cdata] = self._started, sent.waits

    def _behind(self, ins: list[Tensor], outs: list[Tensor]) -> int:
        """Record what is waited for before an operation on these tensors; return which collective's stream it runs on.

        While FSDP reduces, what reads the result of a collective runs behind it, 0 otherwise.
        """
        if not self._pending:
            return 0
        needed = {self._pending[key] for tensor in ins if (key := _key(tensor)) in self._pending}
        if not needed:
            return 0
        number, waits = max(needed)
        if any(scope.startswith(_REDUCE) for scope in self._scopes):
            self._pending |= {_key(tensor): (number, waits) for tensor in outs}
            return self._started - number + 1
        self._pending = {key: of for key, of in self._pending.items() if of not in needed}
        for number, waits in sorted(needed):
            self.work.append(Wait(self._started - number + 1, waits))
        return 0

    def _scope(self, args: tuple[Any, ...]) -> None:
        """Follow the scopes that FSDP names, which say on which of its streams a GPU would do what follows."""
        if args and isinstance(args[0], str):
            self._scopes.append(args[0])
            if args[0].startswith(_BEGIN):
                self.work.append(Free())
            elif args[0].startswith(_REDUCED) and self._reduction:
                self.work.append(Wait(self._started - self._reduction + 1, False))
        elif self._scopes and self._scopes.pop().startswith(_COPY_OUT):
            self.work.append(Free())

    def _retag(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Classify the arguments of FSDP's own operations, and count those that it packs."""
        name = func.name().partition(".")[0]
        if name in _SPLIT_OUT and "out" in kwargs:
            self._move(tensors_of(kwargs["out"]), GATHERED)
        elif name in _COLLECT:
            self._move(tensors_of(args), GRADIENTS)
            self._packed = len(args[0])
        elif name == _COPY_IN:
            self._packed = len(args[0])

    def _about(self, func: Any) -> tuple[bool, Callable[..., int] | None]:
        """Return whether an operation moves data (views do not), and the function that counts its operations."""
        if func not in self._kinds:
            name = func.name().partition("::")[2].partition(".")[0]
            view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
            self._kinds[func] = (not view and name not in _NO_TRAFFIC, flop_registry.get(func._overloadpacket))
        return self._kinds[func]

    # ---- memory ------------------------------------------------------------------------------------------------------

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Exclude tensors that exist already, so that they are not counted when an operation returns them."""
        for tensor in tensors:
            storage = _storage(tensor)
            if storage is not None and storage._cdata not in self._known:
                self._enter(storage, 0, "before")

    def tag(self, tensors: Iterable[Tensor], part: str) -> None:
        """Set what these tensors are used for."""
        self._move(list(tensors), part)

    def _own(self, tensors: list[Tensor], part: str) -> None:
        for tensor in tensors:
            storage = _storage(tensor)
            if storage is not None and storage._cdata not in self._known:
                self._enter(storage, storage.nbytes(), part)

    def _enter(self, storage: torch.UntypedStorage, size: int, part: str) -> None:
        key = storage._cdata
        gone = weakref.ref(storage, lambda _: self._leave(key))
        self._known[key] = (gone, size, part)
        self._add(size, part)

    def _leave(self, key: int) -> None:
        _, size, part = self._known.pop(key)
        self._pending.pop(key, None)
        self._add(-size, part)

    def _add(self, size: int, part: str) -> None:
        self.live += size
        self.by_part[part] += size
        if self.live > self.peak:
            self.peak = self.live
            self.parts = {name: self.by_part[name] for name in DYNAMIC}

    def _move(self, tensors: list[Tensor], part: str) -> None:
        for tensor in tensors:
            storage = _storage(tensor)
            if storage is None or storage._cdata not in self._known:
                continue
            gone, size, before = self._known[storage._cdata]
            if before not in (part, "before"):
                self.by_part[before] -= size
                self.by_part[part] += size
                self._known[storage._cdata] = (gone, size, part)

    def __enter__(self) -> Meter:
        # torch has no other way to observe the sizes of storages, which FSDP changes without an operation.
        resize = self._resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            """Count FSDP's freeing and reallocating of gathered parameters, which bypasses dispatch."""
            result = resize(storage, size)
            known = self._known.get(storage._cdata)
            if known is not None and known[2] != "before":
                gone, before, part = known
                self._known[storage._cdata] = (gone, int(size), part)
                self._add(int(size) - before, part)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None on the meta device."""
    tensor = local(tensor)
    if tensor.device.type == "meta":
        return None
    return tensor.untyped_storage()


def _arithmetic(func: Any, ins: Sequence[Tensor]) -> Arithmetic:
    """Return the arithmetic of an operation; attention in float32 has no TensorFloat-32."""
    if any(t.dtype in (torch.bfloat16, torch.float16) for t in ins):
        return "half"
    products = func._overloadpacket in _PRODUCTS
    return "tf32" if products and not any(t.dtype == torch.float64 for t in ins) else "wide"


def _key(tensor: Tensor) -> int:
    storage = _storage(tensor)
    return 0 if storage is None else storage._cdata


def _compact(ranks: tuple[int, ...]) -> Sequence[int]:
    """Return regular ranks as a range."""
    regular = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0]) if len(ranks) > 1 else range(ranks[0], ranks[0] + 1)
    return regular if tuple(regular) == ranks else ranks


def _bytes(tensor: Tensor) -> int:
    """Return the bytes touched when a tensor is read or written once; repeated (expanded) values count once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of these tensors, counting each storage once."""
    storages = {s._cdata: s.nbytes() for t in tensors if (s := _storage(t)) is not None}
    return sum(storages.values())


@contextmanager
def attention_as_on_gpu() -> Iterator[None]:
    """Compute `torch.nn.functional.scaled_dot_product_attention` as GPUs do, whoever calls it.

    The function is replaced, because a TorchFunctionMode is not active in backward, where blocks are recomputed.
    """
    functional = torch.nn.functional
    original = functional.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        return (original if kwargs.get("enable_gqa") else _efficient_attention)(*args, **kwargs)

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def _efficient_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Tensor:
    """Compute attention as the memory-efficient GPU kernel does, without storing the probabilities.

    The CPU kernel stores them, because otherwise it cannot differentiate the position bias.
    """
    bias = attn_mask
    if bias is not None:
        columns = bias.shape[-1]
        padded = torch.nn.functional.pad(bias, (0, -columns % 16))[..., :columns]
        bias = padded.expand(*q.shape[:2], q.shape[2], k.shape[2])
    result: Tensor = aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]
    return result
