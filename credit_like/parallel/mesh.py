"""The device mesh: world = data × tensor × domain ranks, data outermost, domain innermost."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from credit_like.errors import UserError
from credit_like.parallel.environment import read_environment

DIMS = ("dp", "tp", "domain")
_KEYS = {"data", "tensor", "domain", "replicate"}


def degrees(parallelism_conf: dict[str, Any], world: int) -> tuple[int, int, int]:
    """Return the (data, tensor, domain) degrees for this world size.

    Raises UserError, with the arithmetic, for unknown keys, degrees that are not positive integers, an unknown data
    mode, and a world size that the degrees do not divide.
    """
    unknown = set(parallelism_conf) - _KEYS
    if unknown:
        raise UserError(f"trainer.parallelism: expected the keys {sorted(_KEYS)}, got {sorted(unknown)} as well")
    mode = parallelism_conf.get("data", "none")
    if mode not in ("fsdp2", "ddp", "none"):
        raise UserError(f"trainer.parallelism.data: expected fsdp2, ddp or none, got {mode!r}")
    for key in ("tensor", "domain", "replicate"):
        degree = parallelism_conf.get(key, 1)
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise UserError(f"trainer.parallelism.{key}: expected an integer of at least 1, got {degree!r}")
    tensor, domain = parallelism_conf.get("tensor", 1), parallelism_conf.get("domain", 1)
    if world % (tensor * domain):
        raise UserError(
            f"world size {world} is not divisible by tensor {tensor} × domain {domain} = {tensor * domain}; "
            f"start a multiple of {tensor * domain} processes or change the degrees"
        )
    data = world // (tensor * domain)
    if mode == "none" and data > 1:
        raise UserError(
            f"world size {world} / (tensor {tensor} × domain {domain}) leaves {data} data-parallel ranks, "
            "but trainer.parallelism.data is none; set it to fsdp2 or ddp"
        )
    copies = parallelism_conf.get("replicate", 1)
    if data % copies:
        raise UserError(
            f"trainer.parallelism.replicate {copies} does not divide the data-parallel degree "
            f"{world} / ({tensor} × {domain}) = {data}"
        )
    return data, tensor, domain


def build_device_mesh(
    parallelism_conf: dict[str, Any], device: str = "cuda"
) -> tuple[DeviceMesh | None, dict[str, DeviceMesh]]:
    """Return the mesh (dp, tp, domain) and its 1-D submeshes of more than one rank.

    `parallelism_conf` is the block `trainer.parallelism`. Returns None and {} if nothing is parallel. Raises UserError
    as `degrees` does.
    """
    world = dist.get_world_size() if dist.is_initialized() else read_environment().world
    sizes = degrees(parallelism_conf, world)
    if world == 1:
        return None, {}
    copies = parallelism_conf.get("replicate", 1)
    if copies == 1:
        mesh = init_device_mesh(device, sizes, mesh_dim_names=DIMS)
        return mesh, {name: mesh[name] for name, size in zip(DIMS, sizes, strict=True) if size > 1}
    split = (copies, sizes[0] // copies, *sizes[1:])
    mesh = init_device_mesh(device, split, mesh_dim_names=("dp_replicate", "dp_shard", "tp", "domain"))
    inner = {name: mesh[name] for name, size in zip(DIMS[1:], sizes[1:], strict=True) if size > 1}
    return mesh, {"dp": _flat(mesh, ("dp_replicate", "dp_shard"), "dp"), **inner}


def gradient_mesh(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh over which gradients are averaged: data × domain, 1-D; (replicate, shard) with hybrid sharding.

    Returns None if that is one rank. The domain is included because its ranks hold parts of one sample's gradient.
    """
    if mesh is None:
        return None
    names = mesh.mesh_dim_names
    assert names is not None
    if "dp_replicate" not in names:
        if mesh["dp"].size() * mesh["domain"].size() == 1:
            return None
        if mesh["domain"].size() == 1:
            return mesh["dp"]
        return mesh["domain"] if mesh["dp"].size() == 1 else _flat(mesh, ("dp", "domain"), "dp_domain")
    if mesh["domain"].size() == 1:
        return mesh["dp_replicate", "dp_shard"]
    return DeviceMesh._concatenate([mesh["dp_replicate"], _flat(mesh, ("dp_shard", "domain"), "shard_domain")])


def flat_gradient_mesh(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return `gradient_mesh` in one dimension, also with hybrid sharding."""
    found = gradient_mesh(mesh)
    if found is None or found.ndim == 1:
        return found
    assert mesh is not None
    return _flat(mesh, ("dp_replicate", "dp_shard", "domain"), "replicate_shard_domain")


def _flat(mesh: DeviceMesh, names: tuple[str, ...], name: str) -> DeviceMesh:
    """Return the flattened mesh of this name, which is created once."""
    known = mesh._get_root_mesh()._flatten_mapping
    return known[name] if name in known else mesh[names]._flatten(name)


def data_parallel_coords(conf: dict[str, Any]) -> tuple[int, int]:
    """Return (dp_rank, dp_size) of this process; `conf` is the experiment or its `trainer` or `parallelism` block.

    Samples are split over data-parallel ranks only: ranks that differ only in their tensor or domain coordinate get the
    same.
    """
    block = conf.get("trainer", conf).get("parallelism", conf if "trainer" not in conf else {})
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    else:
        place = read_environment()
        rank, world = place.rank, place.world
    data, tensor, domain = degrees({k: v for k, v in block.items() if k in _KEYS}, world)
    return rank // (tensor * domain), data


def default_mesh() -> DeviceMesh | None:
    """Return all ranks as one data-parallel mesh; None without a process group or with one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
