"""Replacement of layers that mix rows or columns by their domain-parallel versions."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from credit_like.errors import UserError

# These modules are imported because their domain layers register themselves.
from credit_like.parallel.domain import attention, conv, cross_embed, dropout, noise, norms, padding, resize  # noqa: F401
from credit_like.parallel.domain.layer import DOMAIN_LAYERS, DomainLayer
from credit_like.parallel.domain.manager import COLUMNS, ROWS, DomainManager, make_axes
from credit_like.parallel.domain.verify import image_size, verify


def apply_domain_parallel(model: nn.Module, domain_mesh: DeviceMesh, shape: tuple[int, int] | None = None) -> nn.Module:
    """Convert the model, in place, to map this rank's part (B, C, T, h, w) to this rank's part, with unchanged numbers.

    `shape` = (rows, columns) of the grid that the ranks of the mesh form; by default all share rows, and a part has all
    columns. Every layer that mixes rows or columns becomes its domain layer, and the manager with the bands of every level
    is attached (`get_domain_manager`). Apply it before sharding parameters over data ranks. Raises UserError, on all ranks,
    for an operation outside these layers that is not proven to work on each row (or column) alone (with module and
    operation, see `verify`), and for a degree that leaves a rank with nothing (with the degrees that work).
    """
    shape = shape or (domain_mesh.size(), 1)
    # An axis that is not shared is not traced: a single row or column of a small stage would be ambiguous.
    shared = [axis for axis, size in enumerate(shape) if size > 1] or [ROWS]
    proofs = {axis: verify(model, shape[axis], axis) for axis in shared}
    called = proofs[shared[0]].sizes
    layers = {module: name for name, module in model.named_modules() if type(module) in DOMAIN_LAYERS}
    if unused := [name for module, name in layers.items() if module not in called]:
        raise UserError(f"trainer.parallelism.domain: the forward never calls {', '.join(unused)}; remove these layers")
    if shape[COLUMNS] > 1:
        for module, name in layers.items():
            if not DOMAIN_LAYERS[type(module)].columns:
                raise UserError(
                    f"trainer.parallelism.domain: {name} ({type(module).__name__}) cannot share columns; use one number"
                )
    levels = [proofs[axis].levels if axis in proofs else None for axis in (ROWS, COLUMNS)]
    manager = DomainManager(domain_mesh, make_axes(domain_mesh, shape, image_size(model), levels))
    for module in called:
        module.__class__ = DOMAIN_LAYERS[type(module)]
        assert isinstance(module, DomainLayer)
        module.bind(manager, [proofs[axis].sizes[module] if size > 1 else None for axis, size in enumerate(shape)])
    model._domain_manager = manager  # type: ignore[assignment]
    return model
