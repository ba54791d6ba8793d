"""Proof that tensor ranks may compute the features between the split layers of a block apart from each other.

The forward of the whole model is traced on tensors without values, before its layers are split. From a block's `tensor_columns`
to its `tensor_rows` every operation needs a rule (`domain/rules.py`) for the position of the split features in the result, as it
does for rows in the proof of domain layers. What meets them must be split too, or have no gradient, because each rank has the
gradient of its own features alone. After the split the forward is traced again, on this rank's features, and must use the same
numbers. Blocks of this package are not traced: tests compare them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from credit_like.errors import UserError, own_line, reads_values, reason
from credit_like.nn.layer import TensorSplit, tensor_split
from credit_like.parallel.domain import rules
from credit_like.parallel.domain.rules import Call, Mixes, Rows
from credit_like.parallel.foreign import is_foreign
from credit_like.parallel.trace import ForwardMode, Operation, has_sizes, input_shape, tensors_of, without_values

_FEATURES = (
    (r"\bno rows\b", "no split features"),
    (r"\bthe rows\b", "the split features"),
    (r"\brows\b", "split features"),
    (r"\beach row\b", "each feature"),
    (r"\bbands?\b", "part"),
)
"""How the rules' reasons read for features."""


_OF_LAYOUT = rules.COPIES | rules.RESHAPES | frozenset(["expand", "_to_copy"])
"""Operations on which it depends how a tensor lies in memory."""

Step = tuple[nn.Module, str, tuple[tuple[str, Any], ...]]
"""An operation in a block: the block, its name and its numbers."""


def verify(model: nn.Module, degree: int) -> list[Step] | None:
    """Raise UserError, which names block and operation, for a block that does not keep split features apart. No communication.

    The layers of the model are whole. Return the operations, for `verify_part`, or None if there was nothing to trace: there is
    where blocks of others are split, in a model that has the attributes of its sizes.
    """
    blocks = _blocks(model)
    if not (blocks and has_sizes(model)):
        return None
    trace = _Trace(model, blocks, degree)
    try:
        trace.run()
    except (RuntimeError, NotImplementedError) as error:
        if not reads_values(error):
            raise
        raise trace.error(
            f"cannot be traced without values of tensors, which {own_line(error)} reads ({error})"
        ) from error
    return trace.steps


def verify_part(model: nn.Module, degree: int, whole: list[Step]) -> None:
    """Raise UserError for a block that computes otherwise on this rank's features, after the split. No communication."""
    trace = _Trace(model, _blocks(model), degree, part=True)
    try:
        trace.run()
    except (RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"trainer.parallelism.tensor {degree}: {own_line(error)} fails on a part of the features "
            f"({reason(error)}); between tensor_columns and tensor_rows use -1, or sizes of the tensors, in "
            "place of the number of heads or features, or set tensor to 1"
        ) from error
    for (block, name, numbers), (_, other, others) in zip(whole, trace.steps, strict=False):
        if (name, numbers) != (other, others):
            trace.stack = [block]
            raise trace.error(
                f"calls {name} with {dict(numbers)} for all features and {other} with {dict(others)} for a part of them"
            )


def _blocks(model: nn.Module) -> dict[nn.Module, TensorSplit]:
    """Return the blocks of others that are split."""
    return {module: split for module in model.modules() if is_foreign(module) and (split := tensor_split(module))}


class _Trace(ForwardMode):
    """One forward on the meta device, of the whole model, or with `part` of this rank's part, whose operations are only noted."""

    def __init__(
        self, model: nn.Module, blocks: dict[nn.Module, TensorSplit], degree: int, *, part: bool = False
    ) -> None:
        super().__init__(model)
        self.blocks, self.degree, self.part = blocks, degree, part
        self.steps: list[Step] = []
        self.inside = 0
        # Tensors are referenced as long as the trace exists, because they are recognised by identity.
        self.split: dict[int, tuple[Tensor, Rows]] = {}
        self.constant: dict[int, Tensor] = {}
        self.uniform: dict[int, Tensor] = {}

    @torch.no_grad()
    def run(self) -> None:
        """Trace the forward. Raises UserError for an operation that is not proven."""
        tensors = without_values(self.model)
        if self.part:
            # Split parameters have no values yet and stay; buffers may have.
            tensors = {name: blank for name, blank in tensors.items() if not self._value(name).is_meta}
        else:
            self.constant = {id(blank): blank for name, blank in tensors.items() if not self._value(name).requires_grad}
        self.computed(tensors, self.blank_input(input_shape(self.model)))

    def _value(self, name: str) -> Tensor:
        module, _, leaf = name.rpartition(".")
        value: Tensor = getattr(self.model.get_submodule(module), leaf)
        return value

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        """Note where the split layers of a block are called."""
        handles = []
        for block, split in self.blocks.items():
            handles.append(block.register_forward_pre_hook(self._enter))
            handles.append(block.register_forward_hook(self._leave))
            for paths, leave in ((split.columns, self._leave_columns), (split.rows, self._leave_rows)):
                for path in paths:
                    layer = block.get_submodule(path)
                    handles.append(
                        layer.register_forward_pre_hook(self._enter_rows if paths is split.rows else self._step_in)
                    )
                    handles.append(layer.register_forward_hook(leave))
            copies = [copy for path in split.copies if isinstance(copy := getattr(block, path, None), nn.Module)]
            handles += [copy.register_forward_hook(self._leave_copy) for copy in copies]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, block: nn.Module, _args: Any) -> None:
        self.stack.append(block)

    def _leave(self, _block: nn.Module, _args: Any, out: Any) -> None:
        if any(id(t) in self.split for t in tensors_of([out])):
            raise self.error("returns features that are split over the ranks; tensor_rows must take them")
        self.stack.pop()

    def _step_in(self, _layer: nn.Module, args: Any) -> None:
        self.inside += 1
        if any(id(t) in self.split for t in tensors_of(list(args))):
            raise self.error("passes features that are split over the ranks to a layer in tensor_columns")

    def _leave_columns(self, layer: nn.Module, _args: Any, out: Tensor) -> None:
        self.inside -= 1
        if self.part:
            return
        dim = 1 if isinstance(layer, nn.Conv2d) else out.ndim - 1
        self.split[id(out)] = out, Rows(dim, out.shape[dim])

    def _enter_rows(self, layer: nn.Module, args: Any) -> None:
        self.inside += 1
        x = args[0]
        found = self.split.get(id(x), (x, None))[1]
        dim = 1 if isinstance(layer, nn.Conv2d) else x.ndim - 1
        if self.part:
            return
        if found is None or found.dim != dim or found.outer != 1:
            raise self.error(
                f"passes a tensor of shape {tuple(x.shape)} to {self.names[layer]}, in whose dimension {dim} the features are not "
                "those that tensor_columns split, in their order"
            )

    def _leave_rows(self, _layer: nn.Module, _args: Any, _out: Tensor) -> None:
        self.inside -= 1

    def _leave_copy(self, _module: nn.Module, _args: Any, out: Tensor) -> None:
        self.constant[id(out)] = out  # its gradient is summed over the ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.inside:
            return result
        operation = Operation.of(func, args, kwargs)
        name, values = operation.name, operation.values
        if self.stack and name not in _OF_LAYOUT:
            numbers = tuple((key, value) for key, value in values.items() if isinstance(value, int | float))
            self.steps.append((self.stack[-1], name, numbers))
        if self.part:
            return result
        tensors, results = tensors_of(list(values.values())), tensors_of(result)
        carriers = [t for t in tensors if id(t) in self.split] if name not in rules.FACTORIES else []
        if not carriers:
            if all(id(t) in self.constant for t in tensors):
                self.constant |= {id(t): t for t in results}
            if name in rules.FACTORIES:
                self.uniform |= {id(t): t for t in results}
            return result
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        rule = rules.RULES.get(name)
        random = (
            torch.Tag.nondeterministic_seeded in func.tags
        )  # torch's dropout, which depends on the layout by design
        if random or (torch.Tag.pointwise in func.tags and (rule is None or name in ("max", "min"))):
            rule = rules.elementwise
        others = [t for t in tensors if id(t) not in self.split and id(t) not in self.constant]
        if others:
            raise self.error(
                f"calls {name} on {shapes}, of which {tuple(others[0].shape)} is not split and has a gradient, of which each rank "
                "would have a part"
            )
        if rule is None:
            raise self.error(f"calls {name} on {shapes}, which is not known to keep features apart")
        try:
            found = list(rule(Call(values, results, self._rows, lambda t: id(t) in self.uniform, lambda level: level)))
        except Mixes as mixes:
            text = str(mixes)
            for pattern, word in _FEATURES:
                text = re.sub(pattern, word, text)
            raise self.error(f"calls {name} on {shapes}, which mixes features: {text}") from None
        for t, rows in zip(results, found, strict=True):
            if rows is not None:
                self.split[id(t)] = t, rows
        return result

    def _rows(self, t: Tensor) -> Rows | None:
        return self.split[id(t)][1] if id(t) in self.split else None

    def error(self, what: str) -> UserError:
        """Return the error of the block that is running."""
        name, kind = self.described(self.module)
        return UserError(
            f"trainer.parallelism.tensor {self.degree}: {name} ({kind}) {what}. The ranks would not give the numbers of one: order "
            "the features so that each rank's are computed by themselves (of attention by head, then query, key and value), "
            "declare no tensor_columns and tensor_rows there, or set tensor to 1"
        )
