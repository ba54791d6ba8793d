"""Padding of an image of the globe (or of a region) and its removal. Tensors are (B, C, H, W).

Every mode is a list of source rows and a list of source columns, computed here without tensors, so that a band of
latitude rows can be padded from just the rows that it needs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MODES = ("earth", "mirror", "replicate")


def source_rows(mode: str, height: int, north: int, south: int) -> list[tuple[int, bool]]:
    """Return, for each padded row, the source row and whether it is shifted by half the globe.

    earth: the rows beyond a pole are the rows nearest to it, mirrored and shifted by 180° of longitude. mirror:
    reflection without repeating the edge row. replicate: the edge row.
    """
    rows: list[tuple[int, bool]] = []
    for row in range(-north, height + south):
        inside = 0 <= row < height
        if inside or mode == "replicate":
            rows.append((min(max(row, 0), height - 1), False))
        elif mode == "earth":
            rows.append((-1 - row if row < 0 else 2 * height - 1 - row, True))
        else:
            rows.append((-row if row < 0 else 2 * height - 2 - row, False))
    return rows


def source_columns(mode: str, width: int, west: int, east: int) -> list[int]:
    """Return, for each padded column, the source column: circular, or the edge column for `replicate`."""
    columns = range(-west, width + east)
    return [min(max(c, 0), width - 1) if mode == "replicate" else c % width for c in columns]


class Pad(nn.Module):
    """Padding of latitude by (north, south) rows and of longitude by (west, east) columns."""

    def __init__(self, mode: str, pad_lat: tuple[int, int], pad_lon: tuple[int, int]) -> None:
        super().__init__()
        assert mode in MODES, mode
        self.mode = mode
        self.pad_lat, self.pad_lon = (pad_lat[0], pad_lat[1]), (pad_lon[0], pad_lon[1])

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H + north + south, W + west + east)."""
        return self.pad_columns(self.pad_rows(x_BCHW))

    def pad_rows(self, x_BCHW: Tensor) -> Tensor:
        """Pad latitude only."""
        north, south = self.pad_lat
        if north == south == 0:
            return x_BCHW
        return torch.cat([self._beyond(x_BCHW, north, True), x_BCHW, self._beyond(x_BCHW, south, False)], dim=-2)

    def _beyond(self, x_BCHW: Tensor, count: int, northern: bool) -> Tensor:
        """Return the padding rows beyond one edge, using slices only.

        An index list would be copied to the device, which synchronises.
        """
        height, width = x_BCHW.shape[-2:]
        if self.mode == "replicate":
            return x_BCHW.narrow(-2, 0 if northern else height - 1, 1).expand(*x_BCHW.shape[:-2], count, width)
        edge = int(self.mode == "mirror")  # offset from the image's edge to the nearest mirrored row
        beyond = x_BCHW.narrow(-2, edge if northern else height - edge - count, count).flip(-2)
        return beyond.roll(width // 2, dims=-1) if self.mode == "earth" else beyond

    def pad_columns(self, x_BCHW: Tensor) -> Tensor:
        """Pad longitude only, which needs no rows of other ranks."""
        (west, east), width = self.pad_lon, x_BCHW.shape[-1]
        if west == east == 0:
            return x_BCHW
        if self.mode == "replicate":
            return nn.functional.pad(x_BCHW, (west, east, 0, 0), mode="replicate")
        return torch.cat([x_BCHW[..., width - west :], x_BCHW, x_BCHW[..., :east]], dim=-1)


class Unpad(nn.Module):
    """Removal of (north, south) rows and (west, east) columns."""

    def __init__(self, pad_lat: tuple[int, int], pad_lon: tuple[int, int]) -> None:
        super().__init__()
        self.pad_lat, self.pad_lon = (pad_lat[0], pad_lat[1]), (pad_lon[0], pad_lon[1])

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H - north - south, W - west - east)."""
        (north, south), (west, east) = self.pad_lat, self.pad_lon
        height, width = x_BCHW.shape[-2:]
        x_BHWC = x_BCHW.permute(0, 2, 3, 1)  # the gradient then has the memory layout of the decoder's images
        return x_BHWC[:, north : height - south, west : width - east].permute(0, 3, 1, 2)
