"""Replacement of layers that mix rows by their domain-parallel versions."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from credit_like.errors import UserError

# These modules are imported because their domain layers register themselves.
from credit_like.parallel.domain import attention, conv, cross_embed, dropout, noise, norms, padding, resize  # noqa: F401
from credit_like.parallel.domain.layer import DOMAIN_LAYERS, DomainLayer
from credit_like.parallel.domain.manager import DomainManager
from credit_like.parallel.domain.verify import image_size, verify


def apply_domain_parallel(model: nn.Module, domain_mesh: DeviceMesh) -> nn.Module:
    """Convert the model, in place, to map this rank's rows (B, C, T, h, W) to this rank's rows, with unchanged numbers.

    Every layer that mixes rows becomes its domain layer, and the manager with the bands of every level is attached
    (`get_domain_manager`). Apply it before sharding parameters over data ranks. Raises UserError, on all ranks, for an
    operation outside these layers that is not proven to work on each row alone (with module and operation, see
    `verify`), and for a degree that leaves a rank without rows (with the degrees that work).
    """
    proof = verify(model, domain_mesh.size())
    unused = [
        name for name, module in model.named_modules() if type(module) in DOMAIN_LAYERS and module not in proof.heights
    ]
    if unused:
        raise UserError(f"trainer.parallelism.domain: the forward never calls {', '.join(unused)}; remove these layers")
    manager = DomainManager(domain_mesh, proof.levels, *image_size(model))
    for module, heights in proof.heights.items():
        module.__class__ = DOMAIN_LAYERS[type(module)]
        assert isinstance(module, DomainLayer)
        module.bind(manager, *heights)
    model._domain_manager = manager  # type: ignore[assignment]
    return model
