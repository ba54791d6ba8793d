"""Proof that a model computes each row from that row alone, except in layers that have a domain-parallel version.

Columns are proven alike, in a trace of their own; below, and in `rules.py`, rows are those of the axis that is traced.

The model's forward is traced on tensors without values. Between its domain layers every operation on a tensor that
carries rows needs a rule (`rules.py`) for the position of the rows in the result; an operation without a rule is
refused. The forward is traced a second time on the bands of rows that the ranks will have. It must perform the same
operations with the same arguments, which also finds a number that depends on the height, or a tensor with a value for
each row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from credit_like import bands
from credit_like.bands import Level
from credit_like.errors import UserError, reads_values
from credit_like.parallel.domain import rules
from credit_like.parallel.domain.layer import DOMAIN_LAYERS, Sizes
from credit_like.parallel.domain.rules import Call, Mixes, Rows
from credit_like.parallel.trace import (
    BATCH,
    ForwardMode,
    Operation,
    input_shape,
    storage_of,
    tensors_of,
    without_values,
)


@dataclass(frozen=True)
class Proof:
    """Result of the trace: (rows in, rows out) of every domain layer, and the level of every height."""

    sizes: dict[nn.Module, Sizes]
    levels: dict[int, Level]


def verify(model: nn.Module, degree: int, axis: int = 0) -> Proof:
    """Prove that the model computes on `degree` bands of rows the same as on the whole image. No communication.

    axis: 0 for rows, 1 for columns.

    Raises UserError with the module and operation that mixes rows, or cannot be proven not to, and for a degree that
    leaves a rank without rows. The model is traced in its current mode (training or evaluation).
    """
    whole = _Trace(model, axis)
    whole.run()
    levels = _levels(model, whole.heights, axis)
    if problem := bands.degree_problem(levels, degree, axis):
        raise UserError(f"trainer.parallelism.domain: {problem}")
    for heights in _distinct_bands(levels, degree):
        _Trace(model, axis, heights, whole).run()
    return Proof(whole.heights, levels)


def image_size(model: nn.Module) -> tuple[int, int]:
    """Return (rows, columns) of the image that the model was built for."""
    height, width = getattr(model, "height", None), getattr(model, "width", None)
    assert isinstance(height, int)
    assert isinstance(width, int)
    return height, width


def _levels(model: nn.Module, heights: dict[nn.Module, Sizes], axis: int) -> dict[int, Level]:
    """Return every height in the model with the requirements of its layers on the bands there."""
    found = [Level(image_size(model)[axis], why="the image")]
    for module, (height_in, height_out) in heights.items():
        found += [Level(height_in), Level(height_out)]
        found += DOMAIN_LAYERS[type(module)].levels(module, height_in, height_out)  # type: ignore[arg-type]
    return bands.merge(found)


def _distinct_bands(levels: dict[int, Level], degree: int) -> list[dict[int, int]]:
    """Return the rows of a rank at every level, once for each distinct combination of band sizes."""
    if degree == 1:
        return []
    shares = {height: bands.bands(height, level.unit, degree) for height, level in levels.items()}
    found = {tuple(stop - start for start, stop in own) for own in zip(*shares.values(), strict=True)}
    return [dict(zip(shares, sizes, strict=True)) for sizes in sorted(found)]


@dataclass(frozen=True)
class _Step:
    """An operation or a domain layer, described by what must be the same on a band as on the whole image."""

    module: nn.Module
    name: str
    arguments: tuple[Any, ...]
    results: tuple[Any, ...]


@dataclass(frozen=True)
class _Uniform:
    """A tensor without rows, all of whose values are equal."""


_Known = Rows | _Uniform | None


class _Trace(ForwardMode):
    """One forward on the meta device.

    It traces the rows of the whole image (or with axis 1 its columns), or with `heights` (level -> rows) a band, compared
    with the trace `whole`.
    """

    def __init__(
        self, model: nn.Module, axis: int, heights: dict[int, int] | None = None, whole: _Trace | None = None
    ) -> None:
        super().__init__(model)
        self.axis, self.band, self.whole = axis, heights, whole
        self.inside = 0
        self.heights: dict[nn.Module, Sizes] = {}
        self.steps: list[_Step] = []
        self.outputs: list[Tensor] = []
        # Tensors are referenced as long as the trace exists, because they are recognised by identity.
        self.known: dict[int, tuple[Tensor, _Known]] = {}
        self.made: dict[int, Tensor] = {}  # by storage: tensors made by a factory
        self.written: dict[int, bool] = {}  # by storage: whether rows were written into a tensor made by a factory

    def height(self, level: int) -> int:
        """Return the number of rows of this trace at a level."""
        return level if self.band is None else self.band.get(level, level)

    # -- the forward ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self) -> None:
        """Trace the forward. Raises UserError for an operation that is not proven."""
        shape, dim = input_shape(self.model), 3 + self.axis
        tensors = without_values(self.model)
        for value in tensors.values():
            self._know(value, None)
        band = [self.height(size) if at == dim else size for at, size in enumerate(shape)]
        x = self.blank_input(band)
        self._know(x, Rows(dim, shape[dim]))
        try:
            y = self.computed(tensors, x)
        except UserError:
            raise
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            if self.whole is not None:
                raise self._error(
                    f"fails on a band of {self.height(shape[dim])} of {shape[dim]} rows ({error})"
                ) from error
            if not (isinstance(error, RuntimeError) and reads_values(error)):
                raise
            raise self._error(f"cannot be traced without values of tensors, which it reads ({error})") from error
        self._check_output(y, tuple(band[3:]), Rows(dim, shape[dim]))
        if self.whole is not None and len(self.steps) < len(self.whole.steps):
            raise self._error(f"performs fewer operations on a band than on all {shape[dim]} rows")

    def _check_output(self, y: Any, image: tuple[int, ...], rows: Rows) -> None:
        self.stack = []
        if not isinstance(y, Tensor) or y.ndim != 5 or (y.shape[0], *y.shape[2:]) != (BATCH, 1, *image):
            got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise self._error(f"returns {got}, expected (batch, channels, 1, {image[0]}, {image[1]})")
        known = self._known(y, "its output")
        if known != rows and not isinstance(known, _Uniform):
            raise self._error("returns rows that are not the bands of the image, or a tensor without rows")

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        """Maintain the stack of modules; on a band, replace every domain layer by a tensor of its output's shape."""
        handles = []
        replaced = []
        for module in self.names:
            domain = type(module) in DOMAIN_LAYERS
            handles.append(module.register_forward_pre_hook(self._enter_layer if domain else self._enter))
            handles.append(module.register_forward_hook(self._leave_layer if domain else self._leave))
            if domain and self.whole is not None:
                module.__dict__["forward"] = self._stand_in
                replaced.append(module)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module in replaced:
                del module.__dict__["forward"]

    def _enter(self, module: nn.Module, _args: tuple[Any, ...]) -> None:
        self.stack.append(module)

    def _leave(self, _module: nn.Module, _args: tuple[Any, ...], _out: Any) -> None:
        self.stack.pop()

    def _enter_layer(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.stack.append(module)
        self.inside += 1
        if self.inside == 1:
            dim = DOMAIN_LAYERS[type(module)].row_dim + self.axis
            if len(args) != 1 or not isinstance(args[0], Tensor):
                raise self._error("is a domain layer and gets more, or other, than one tensor")
            if self._known(args[0], "the call") != Rows(
                dim, args[0].shape[dim] if self.band is None else self._level_in()
            ):
                raise self._error(
                    f"is a domain layer and expects the image's rows in dimension {dim}, "
                    f"got a tensor of shape {tuple(args[0].shape)} that has them elsewhere or in other bands"
                )

    def _level_in(self) -> int:
        """Return the height of the input of the current domain layer in the trace of the whole image."""
        assert self.whole is not None
        return self.whole.heights[self.stack[-1]][0]

    def _leave_layer(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self.inside -= 1
        kind = DOMAIN_LAYERS[type(module)]
        if self.band is None:
            dim = kind.row_dim + self.axis
            sizes = (args[0].shape[dim], out.shape[dim])
            if self.heights.setdefault(module, sizes) != sizes:
                raise self._error(f"is used at two sizes, {self.heights[module]} and {sizes}; use one layer for each")
        if self.inside == 0:
            height_out = self.heights[module][1] if self.band is None else self.whole.heights[module][1]  # type: ignore[union-attr]
            rows = kind.rows_out(module, height_out, self.axis)  # type: ignore[arg-type]
            self._know(out, rows)
            self.outputs.append(out)
            self._record(_Step(module, "domain layer", (), ((rows, _shape(out, rows)),)))
        self.stack.pop()

    def _stand_in(self, _x: Tensor, **_shared: Any) -> Tensor:
        """Return a band of the current domain layer's output on the whole image, with the same memory order."""
        assert self.whole is not None
        if len(self.outputs) >= len(self.whole.outputs):
            raise self._error("is called more often on a band than on the whole image")
        whole = self.whole.outputs[len(self.outputs)]
        known = self.whole.known[id(whole)][1]
        assert isinstance(known, Rows)
        shape = list(whole.shape)
        shape[known.dim] = int(self.height(known.level) * known.share)
        strides = whole.stride()
        order = sorted(range(whole.ndim), key=lambda d: (-strides[d], d))
        blank = torch.empty([shape[d] for d in order], dtype=whole.dtype, device="meta")
        return blank.permute([order.index(d) for d in range(whole.ndim)])

    # -- operations -----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self.inside:
            return _result(func, args, kwargs or {})
        operation = Operation.of(func, args, kwargs)
        name, values, written = operation.name, operation.values, operation.written
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self._error(
                f"calls {name}: its random numbers would differ between layouts; use credit_like.nn.noise, or of dropout "
                "credit_like.nn.dropout or a rate of 0"
            )
        tensors = tensors_of(list(values.values()))
        known = [self._known(t, name) for t in tensors]
        rows = any(isinstance(k, Rows) for k in known) and name not in rules.FACTORIES
        pointwise = torch.Tag.pointwise in func.tags
        rule = rules.elementwise if pointwise and name not in rules.RULES else rules.RULES.get(name)
        if pointwise and name in ("max", "min"):
            rule = rules.elementwise
        if rows and rule is None:
            raise self._error(f"calls {name} on rows, which is not known to keep them apart")
        result = _result(func, args, kwargs or {})
        results = tensors_of(result)
        call = Call(values, results, self._rows, self._is_uniform, self.height, self._expected())
        found: list[_Known]
        if rows:
            assert rule is not None
            try:
                found = list(rule(call))
                self._check_extents(results, found)
            except Mixes as reason:
                shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
                raise self._error(f"calls {name} on {shapes}, which mixes rows: {reason}") from None
        elif name in rules.FACTORIES:
            found = [_Uniform() for _ in results]
        else:
            keeps = pointwise or name in rules.KEEPS_UNIFORM
            uniform = keeps and bool(known) and all(isinstance(k, _Uniform) for k in known)
            found = [_Uniform() if uniform else None for _ in results]
        if written:
            self._write(name, written, results, found)
        else:
            for t, k in zip(results, found, strict=True):
                self._know(t, k)
                if name in rules.FACTORIES:
                    self.made[storage_of(t)] = t
        loose = rows or pointwise or name in rules.KEEPS_UNIFORM or name in rules.FACTORIES
        if name not in rules.COPIES or not rows:
            self._record(_step(self.module, name, values, tensors, known, results, found, loose=loose))
        return result

    def _expected(self) -> Rows | None:
        """Return the position of the rows after this operation on the whole image."""
        at = len(self.steps)
        if self.whole is None or at >= len(self.whole.steps) or not self.whole.steps[at].results:
            return None
        known = self.whole.steps[at].results[0][0]
        return known if isinstance(known, Rows) else None

    def _check_extents(self, results: list[Tensor], found: list[_Known]) -> None:
        for t, k in zip(results, found, strict=True):
            if isinstance(k, Rows) and t.shape[k.dim] != k.outer * self.height(k.level) * k.share:
                raise Mixes(f"its result of shape {tuple(t.shape)} does not have these rows")

    def _write(self, name: str, written: list[Tensor], results: list[Tensor], found: list[_Known]) -> None:
        """Check an in-place operation: rows stay in place, and only a new tensor without rows may receive rows."""
        if len(written) != 1 or len(results) != 1 or results[0] is not written[0]:
            if any(isinstance(k, Rows) for k in (*found, *(self._known(t, name) for t in written))):
                raise self._error(f"calls {name}, which writes rows into another tensor")
            for t in written:
                self.written.setdefault(storage_of(t), False)
            return
        (target,), (after,) = written, found
        before = self._known(target, name)
        if isinstance(before, Rows):
            if after != before:
                raise self._error(f"calls {name} in place, which would move rows")
        elif isinstance(after, Rows):
            self._adopt(name, target, after)
        else:
            self.written.setdefault(storage_of(target), False)
            self._know(target, None)

    def _adopt(self, name: str, target: Tensor, rows: Rows) -> None:
        """Record that rows were written into a tensor made by a factory, or into a part of it that has whole rows."""
        base = self.made.get(storage_of(target))
        fits = (
            base is not None
            and self.written.get(storage_of(target)) is None
            and base.ndim == target.ndim
            and base.stride() == target.stride()
            and base.shape[rows.dim] == target.shape[rows.dim]
        )
        if not fits:
            raise self._error(f"calls {name} in place, which writes rows into a tensor without rows")
        assert base is not None
        self.written[storage_of(target)] = True
        for t in (base, target):
            self._know(t, rows)

    # -- what is known of tensors ---------------------------------------------------------------------------------------

    def _know(self, t: Tensor, known: _Known) -> None:
        self.known[id(t)] = (t, known)

    def _known(self, t: Tensor, name: str) -> _Known:
        """Return Rows, uniform, or None for other values that all ranks share.

        Raises UserError for a tensor of unknown origin.
        """
        if id(t) not in self.known:
            if t.is_meta:
                raise self._error(
                    f"calls {name} with a tensor of shape {tuple(t.shape)} that is neither a parameter nor a buffer; register it "
                    "(a number needs no tensor)"
                )
            self._know(t, None)
        known = self.known[id(t)][1]
        if not isinstance(known, Rows) and (has_rows := self.written.get(storage_of(t))) is not None:
            if has_rows:
                raise self._error(f"calls {name} with a view that was taken before rows were written into its tensor")
            return None
        return known

    def _rows(self, t: Tensor) -> Rows | None:
        known = self._known(t, "an operation")
        return known if isinstance(known, Rows) else None

    def _is_uniform(self, t: Tensor) -> bool:
        return isinstance(self._known(t, "an operation"), _Uniform)

    # -- comparison and messages ----------------------------------------------------------------------------------------

    def _record(self, step: _Step) -> None:
        """Record the step; on a band, require that it equals that of the whole image."""
        self.steps.append(step)
        if self.whole is None:
            return
        done = self.whole.steps
        before = done[len(self.steps) - 1] if len(self.steps) <= len(done) else None
        if step != before:
            other = before if before is not None and before.module is not step.module else step
            raise self._error(
                f"calls {other.name} with arguments or shapes, "
                f"or at all, depending on the number of rows: {_differs(before, step)}",
                other.module,
            )

    def _error(self, what: str, module: nn.Module | None = None) -> UserError:
        name, kind = self.described(module or self.module)
        what = bands.of_axis(f"{what}. A band of rows would not give the numbers of the whole image", self.axis)
        return UserError(
            f"trainer.parallelism.domain: {name} ({kind}) {what}: use the layers of credit_like.nn there, write a domain "
            "layer, or set domain to 1"
        )


_FORMS: dict[Any, Any] = {}
"""(shape, stride, dtype) of the results of operations without values, by operation and arguments.

Much of torch's arithmetic of shapes is Python and takes up to milliseconds; the blocks of a model repeat the same operations,
and so do the traces of one model.
"""


def _result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation on tensors without values; one that makes new tensors is computed once."""
    schema = func._schema
    makes = all(a.alias_info is None for a in (*schema.arguments, *schema.returns))
    key = _form((func, args, tuple(sorted(kwargs.items())))) if makes else None
    if key is None:
        return func(*args, **kwargs)
    if key not in _FORMS:
        result = func(*args, **kwargs)
        many = result if isinstance(result, tuple) else (result,)
        form = tuple(_form(each) for each in many) if all(isinstance(each, Tensor) for each in many) else None
        _FORMS[key] = None if form is None or None in form else (isinstance(result, tuple), form)
        return result
    if (found := _FORMS[key]) is None:
        return func(*args, **kwargs)
    several, form = found
    made = tuple(torch.empty_strided(size, stride, dtype=dtype, device="meta") for _, size, stride, dtype in form)
    return made if several else made[0]


def _form(value: Any) -> Any:
    """Return the part of an argument on which the form of a result depends, or None where that may be more, such as values."""
    if isinstance(value, Tensor):
        return (Tensor, value.shape, value.stride(), value.dtype) if type(value) is Tensor and value.is_meta else None
    if isinstance(value, list | tuple):
        found = tuple(_form(item) for item in value)
        return None if None in found else (type(value), found)
    return (type(value), value)


def _shape(t: Tensor, known: _Known) -> tuple[int | None, ...]:
    """Return the sizes that may not depend on the height.

    For a uniform tensor there are none; rows and repeated values are left out.
    """
    if isinstance(known, Rows):
        return tuple(None if d == known.dim else n for d, n in enumerate(t.shape))
    if isinstance(known, _Uniform):
        return ()
    return tuple(n if n == 1 or t.stride(d) else None for d, n in enumerate(t.shape))


def _step(
    module: nn.Module,
    name: str,
    values: dict[str, Any],
    tensors: list[Tensor],
    known: list[_Known],
    results: list[Tensor],
    found: list[_Known],
    *,
    loose: bool,
) -> _Step:
    """Return a description of an operation without the parts that follow from the number of rows.

    loose: uniform tensors and repeated values may have any size. If values are summed, their number matters.
    """
    ignored = rules.SIZES.get(name, ())
    if name == "slice" and results[0].shape == tensors[0].shape:  # the slice is the whole dimension
        ignored = ("start", "end")
    by_tensor = {id(t): k for t, k in zip(tensors, known, strict=True)}

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            k = by_tensor[id(value)]
            shape = _shape(value, k) if loose or isinstance(k, Rows) else tuple(value.shape)
            return (k, shape, value.dtype, None if value.is_meta else _digest(value))
        if isinstance(value, list | tuple):
            return tuple(plain(item) for item in value)
        return value

    arguments = tuple((key, plain(value)) for key, value in values.items() if key not in ignored)
    alike = "reshape" if name in rules.RESHAPES else name
    return _Step(module, alike, arguments, tuple((k, _shape(t, k)) for t, k in zip(results, found, strict=True)))


def _digest(t: Tensor) -> str:
    """Return a hash of a tensor's values."""
    return hashlib.sha256(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def _differs(before: _Step | None, step: _Step) -> str:
    """Return a description of the first difference."""
    if before is None or before.name != step.name:
        return f"where the whole image calls {before.name if before else 'nothing'}, a band calls {step.name}"
    for (name, whole), (_, band) in zip(before.arguments, step.arguments, strict=False):
        if whole != band:
            return f"{name} is {whole} for the whole image and {band} for a band"
    return "its results have other shapes"
