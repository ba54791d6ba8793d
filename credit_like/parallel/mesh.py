"""The device mesh: world = data × ensemble × tensor × domain ranks, data outermost, domain innermost."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from credit_like.layout import KEYS, Degrees, divide
from credit_like.parallel.environment import read_environment

DIMS = ("dp", "ensemble", "tp", "domain")
_PARTS = ("ensemble", "domain")
"""Dimensions whose ranks have parts of the loss of one sample."""


def degrees(parallelism_conf: dict[str, Any], world: int) -> tuple[int, int, int]:
    """Return the (data, tensor, domain) degrees for this world size.

    Raises UserError, with the arithmetic, for unknown keys, degrees that are not positive integers, an unknown data
    mode, and a world size that the degrees do not divide.
    """
    at = divide(Degrees.parse(parallelism_conf), world)
    return at.data, at.tensor, at.domain


def build_device_mesh(
    parallelism_conf: dict[str, Any], device: str = "cuda"
) -> tuple[DeviceMesh | None, dict[str, DeviceMesh]]:
    """Return the mesh (dp, ensemble, tp, domain) and its 1-D submeshes of more than one rank.

    `parallelism_conf` is the block `trainer.parallelism`. Returns None and {} if nothing is parallel. Raises UserError
    as `degrees` does.
    """
    world = dist.get_world_size() if dist.is_initialized() else read_environment().world
    at = divide(Degrees.parse(parallelism_conf), world)
    if world == 1:
        return None, {}
    sizes, copies = (at.data, at.ensemble, at.tensor, at.domain), at.replicate
    if copies == 1:
        mesh = limited(init_device_mesh(device, sizes, mesh_dim_names=DIMS))
        return mesh, {name: mesh[name] for name, size in zip(DIMS, sizes, strict=True) if size > 1}
    split = (copies, sizes[0] // copies, *sizes[1:])
    mesh = limited(init_device_mesh(device, split, mesh_dim_names=("dp_replicate", "dp_shard", *DIMS[1:])))
    inner = {name: mesh[name] for name, size in zip(DIMS[1:], sizes[1:], strict=True) if size > 1}
    return mesh, {"dp": limited(mesh["dp_replicate", "dp_shard"]._flatten("dp")), **inner}


def gradient_mesh(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh over which gradients are averaged: data × ensemble × domain; (replicate, shard) with hybrid sharding.

    It has one dimension, or two with hybrid sharding. Returns None if that is one rank. Ensemble and domain are included
    because their ranks hold parts of one sample's gradient.
    """
    if mesh is None:
        return None
    names = mesh.mesh_dim_names
    assert names is not None
    if "dp_replicate" not in names:
        return _flat(mesh, _several(mesh, "dp", *_PARTS))
    parts = _several(mesh, *_PARTS)
    if not parts:
        return mesh["dp_replicate", "dp_shard"]
    shard = _flat(mesh, ("dp_shard", *parts))
    assert shard is not None
    return DeviceMesh._concatenate([mesh["dp_replicate"], shard])


def flat_gradient_mesh(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return `gradient_mesh` in one dimension, also with hybrid sharding."""
    found = gradient_mesh(mesh)
    if found is None or found.ndim == 1:
        return found
    assert mesh is not None
    return _flat(mesh, ("dp_replicate", "dp_shard", *_several(mesh, *_PARTS)))


def _several(mesh: DeviceMesh, *names: str) -> tuple[str, ...]:
    """Return those of the dimensions that have more than one rank."""
    return tuple(name for name in names if mesh[name].size() > 1)


def _flat(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh | None:
    """Return these dimensions as one, which is created once; None without a dimension."""
    if len(names) < 2:
        return mesh[names[0]] if names else None
    known, name = mesh._get_root_mesh()._flatten_mapping, "_".join(names)
    return known[name] if name in known else limited(mesh[names]._flatten(name))


def limited(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh, whose groups wait as long as the default group; torch gives a new group its own default."""
    if dist.get_backend() != "fake":
        world = dist.distributed_c10d._get_default_group()
        limit = world._get_backend(torch.device("cpu")).options._timeout
        for group in mesh.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(limit, group)
    return mesh


def data_parallel_coords(conf: dict[str, Any]) -> tuple[int, int]:
    """Return (dp_rank, dp_size) of this process; `conf` is the experiment or its `trainer` or `parallelism` block.

    Samples are split over data-parallel ranks only: ranks that differ only in their ensemble, tensor or domain coordinate
    get the same.
    """
    block = conf.get("trainer", conf).get("parallelism", conf if "trainer" not in conf else {})
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    else:
        place = read_environment()
        rank, world = place.rank, place.world
    at = divide(Degrees.parse({key: value for key, value in block.items() if key in KEYS}), world)
    return at.coordinates(rank)[0], at.data


def default_mesh() -> DeviceMesh | None:
    """Return all ranks as one data-parallel mesh; None without a process group or with one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"  # "cpu:gloo,cuda:nccl" if `Runtime.start` made the group
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
