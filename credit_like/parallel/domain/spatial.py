"""Conversion between whole images and their parts, outside the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from credit_like.bands import Band
from credit_like.nn.resize import bilinear
from credit_like.parallel.collectives import sum_over
from credit_like.parallel.domain.manager import Axis, DomainManager
from credit_like.parallel.domain.resize import needed, resample, source_band


def shard_spatial(tensor: Tensor, manager: DomainManager | None) -> Tensor:
    """Return this rank's part of a (…, H, W) tensor; all of it without domain parallelism."""
    if manager is None:
        return tensor
    for dim, axis in zip((-2, -1), manager.axes, strict=True):
        start, stop = axis.own(tensor.shape[dim])
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def present_bands(tensor: Tensor, axis: Axis, dim: int) -> list[Band]:
    """Return the band that each rank along an axis holds of an image, in the order of ranks. Collective."""
    mine = torch.tensor([tensor.shape[dim]], device=tensor.device)
    sizes = [torch.empty_like(mine) for _ in range(axis.size)] if axis.size > 1 else [mine]
    if axis.size > 1:
        dist.all_gather(sizes, mine, group=axis.group)
    stops = torch.cat(sizes).cumsum(0).tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


def gather_spatial(tensor: Tensor, manager: DomainManager | None, differentiable: bool = False) -> Tensor:
    """Return the whole (…, H, W) image on every rank, given bands in rank order, which may be uneven. Collective.

    Differentiable on request: the gradients that the ranks have for a point are summed on its owner.
    """
    if manager is None:
        return tensor
    tensor = tensor if differentiable else tensor.detach()
    for dim, axis in zip((tensor.ndim - 2, tensor.ndim - 1), manager.axes, strict=True):
        if axis.size > 1:
            have = [list(range(*band)) for band in present_bands(tensor, axis, dim)]
            everything = list(range(have[-1][-1] + 1))
            tensor = axis.fetch(tensor, axis.plan(have, [everything] * axis.size), dim)
    return tensor


class ChunkShare:
    """The share that a rank has of the output of the model (…, H, W), in whole chunks of `chunk` = (rows, columns).

    Bands of chunks are as equal as bands of points. Where there are as many chunks as ranks, only the few points between the
    edges of bands and of chunks are sent; one chunk of a whole field is collected on the group's first rank.
    """

    def __init__(self, manager: DomainManager, chunk: tuple[int, int]) -> None:
        axes = list(zip(manager.axes, chunk, strict=True))
        bands = [axis.of_chunks(size) for axis, size in axes]
        self.manager = manager
        rows, columns = (of_all[axis.rank] for of_all, axis in zip(bands, manager.axes, strict=True))
        self.part = slice(*rows), slice(*columns)
        """The rows and columns of the share."""
        self.empty = rows[0] == rows[1] or columns[0] == columns[1]
        self.first = manager.rank == 0
        self.alone = all(sum(stop > start for start, stop in of_all) == 1 for of_all in bands)
        """Whether one rank has all chunks."""
        self._plans = [axis.plan_to_chunks(size) for axis, size in axes]

    def collect(self, fields: Tensor) -> Tensor | None:
        """Return the share of the fields of which this rank has its points; None where it is empty. Collective.

        Every rank sends each point at most once along each axis. The bands are known to the manager, so nothing is asked of
        other ranks or the device.
        """
        fields = fields.detach()
        for dim in (1, 0):
            fields = self.manager.axes[dim].fetch(fields, self._plans[dim], fields.ndim - 2 + dim)
        return None if self.empty else fields

    def wait_for_all(self, device: torch.device) -> None:
        """Wait until all ranks that share the fields arrive here."""
        sum_over(torch.zeros((), device=device), self.manager.group).item()


def unpad_shard_interp(
    y_pred: Tensor, padding_opt: Any, manager: DomainManager | None, image_h: int, image_w: int
) -> Tensor:
    """Return this rank's part of the image, given its padded output (B, C, h, w) or (B, C, 1, h, w). Collective.

    padding_opt: None, or an object or mapping with `pad_lat` and `pad_lon` (with `activate: false` there is no
    padding). If the unpadded size differs from (image_h, image_w), it is resized as by the serial bilinear resize, with
    rows and columns of other ranks where needed. Without a manager (None) the part is the whole image. Differentiable.
    """
    if manager is None:
        return _unpad_interp(y_pred, padding_opt, image_h, image_w)
    x = y_pred.flatten(1, 2) if y_pred.ndim == 5 else y_pred
    found = [present_bands(x, axis, dim) for dim, axis in enumerate(manager.axes, 2)]
    pads, sizes = _pads(padding_opt), (image_h, image_w)
    before = [bands[-1][1] - sum(pad) for bands, pad in zip(found, pads, strict=True)]
    same = tuple(before) == sizes
    for dim, axis in enumerate(manager.axes, 2):
        bands, first, size_in, size_out = found[dim - 2], pads[dim - 2][0], before[dim - 2], sizes[dim - 2]
        if axis.size == 1:
            x = x.narrow(dim, first, size_in)
            continue
        targets = axis.bands(size_out)
        sources = targets if same else [source_band(band, size_in, size_out) for band in targets]
        want = [[at + first for at in range(*source)] for source in sources]
        x = axis.fetch(x, axis.plan([list(range(*band)) for band in bands], want), dim)
    if not same:
        shared = [axis.size > 1 for axis in manager.axes]
        local = [n if split else m for split, n, m in zip(shared, x.shape[2:], sizes, strict=True)]
        x = bilinear(x, (local[0], local[1])) if list(x.shape[2:]) != local else x
        for dim, axis in enumerate(manager.axes, 2):
            if axis.size > 1:
                size_in, size_out = before[dim - 2], sizes[dim - 2]
                x = resample(x, dim, *needed(axis, size_in, size_out), size_in, size_out)
    return x.unflatten(1, y_pred.shape[1:3]) if y_pred.ndim == 5 else x


def _unpad_interp(y_pred: Tensor, padding_opt: Any, image_h: int, image_w: int) -> Tensor:
    """Unpad and resize the whole image, without communication."""
    (north, south), (west, east) = _pads(padding_opt)
    x = y_pred.flatten(1, 2) if y_pred.ndim == 5 else y_pred
    x = x[..., north : x.shape[-2] - south, west : x.shape[-1] - east]
    if x.shape[-2:] != (image_h, image_w):
        x = bilinear(x, (image_h, image_w))
    return x.unflatten(1, y_pred.shape[1:3]) if y_pred.ndim == 5 else x


def _pads(option: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return ((north, south), (west, east)) of a padding option."""

    def get(key: str, default: Any) -> Any:
        return option.get(key, default) if isinstance(option, dict) else getattr(option, key, default)

    if option is None or not get("activate", True):
        return (0, 0), (0, 0)
    lat, lon = get("pad_lat", (0, 0)), get("pad_lon", (0, 0))
    return (int(lat[0]), int(lat[1])), (int(lon[0]), int(lon[1]))
