"""Data, ensemble, tensor and domain parallelism in any combination, with the same numbers as a single process.

The names below are imported on first use, so that importing the package does not require torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "build_device_mesh": "mesh",
    "data_parallel_coords": "mesh",
    "apply_tensor_parallel": "tensor_parallel",
    "apply_domain_parallel": "domain.apply",
    "get_domain_manager": "domain.manager",
    "shard_spatial": "domain.spatial",
    "gather_spatial": "domain.spatial",
    "unpad_shard_interp": "domain.spatial",
    "sync_domain_gradients": "domain.gradients",
    "apply_fsdp2": "fsdp2",
    "apply_ddp": "ddp",
    "get_raw_model": "unwrap",
    "clip_grad_norm_": "collectives",
    "total_grad_norm": "collectives",
    "parallelise": "apply",
    "Runtime": "runtime",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
