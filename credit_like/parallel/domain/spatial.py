"""Conversion between whole images and bands of rows, outside the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from credit_like.bands import Band
from credit_like.nn.resize import bilinear
from credit_like.parallel.domain.manager import DomainManager
from credit_like.parallel.domain.resize import interpolate_rows, source_band


def shard_spatial(tensor: Tensor, manager: DomainManager | None) -> Tensor:
    """Return this rank's latitude rows (dimension −2) of a (…, H, W) tensor; all of them without domain parallelism."""
    if manager is None:
        return tensor
    start, stop = manager.own(tensor.shape[-2])
    return tensor[..., start:stop, :]


def present_bands(tensor: Tensor, manager: DomainManager) -> list[Band]:
    """Return the rows that each rank holds of an image whose bands are in rank order. Collective."""
    mine = torch.tensor([tensor.shape[-2]], device=tensor.device)
    heights = [torch.empty_like(mine) for _ in range(manager.size)]
    dist.all_gather(heights, mine, group=manager.group)
    stops = torch.cat(heights).cumsum(0).tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


def gather_spatial(tensor: Tensor, manager: DomainManager | None, differentiable: bool = False) -> Tensor:
    """Return the whole (…, H, W) image on every rank, given bands in rank order, which may be uneven. Collective.

    Differentiable on request: the gradients that the ranks have for a row are summed on its owner.
    """
    if manager is None:
        return tensor
    have = [list(range(*band)) for band in present_bands(tensor, manager)]
    everything = list(range(have[-1][-1] + 1))
    plan = manager.plan(have, [everything] * manager.size)
    return manager.fetch(tensor if differentiable else tensor.detach(), plan, tensor.ndim - 2)


def gather_on_first(fields: Tensor, manager: DomainManager | None) -> Tensor | None:
    """Return the whole output of the model (…, H, W) on the group's first rank, None on the others. Collective.

    Every rank sends its rows once. The bands are known to the manager, so nothing is asked of other ranks or the device.
    """
    if manager is None:
        return fields
    whole = manager.fetch(fields.detach(), manager.plan_to_first, fields.ndim - 2)
    return whole if manager.rank == 0 else None


def unpad_shard_interp(
    y_pred: Tensor, padding_opt: Any, manager: DomainManager | None, image_h: int, image_w: int
) -> Tensor:
    """Return this rank's rows of the image, given its padded output rows (B, C, h, w) or (B, C, 1, h, w). Collective.

    padding_opt: None, or an object or mapping with `pad_lat` and `pad_lon` (with `activate: false` there is no
    padding). If the unpadded size differs from (image_h, image_w), it is resized as by the serial bilinear resize, with
    rows of other ranks where needed. Without a manager (None) the rows are those of the whole image. Differentiable.
    """
    if manager is None:
        return _unpad_interp(y_pred, padding_opt, image_h, image_w)
    bands = present_bands(y_pred, manager)
    squeezed = y_pred.flatten(1, 2) if y_pred.ndim == 5 else y_pred
    (north, south), (west, east) = _pads(padding_opt)
    height = bands[-1][1] - north - south
    targets = manager.bands(image_h)
    same = (height, squeezed.shape[-1] - west - east) == (image_h, image_w)
    sources = targets if same else [source_band(band, height, image_h) for band in targets]
    have = [list(range(*band)) for band in bands]
    plan = manager.plan(have, [[row + north for row in range(*source)] for source in sources])
    x = manager.fetch(squeezed, plan, 2)
    x = x[..., west : x.shape[-1] - east]
    if not same:
        if x.shape[-1] != image_w:
            x = bilinear(x, (x.shape[-2], image_w))
        x = interpolate_rows(x, targets[manager.rank], sources[manager.rank], height, image_h)
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
