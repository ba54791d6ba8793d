"""Noise on the input of a training step, so that the model learns to correct deviations from the data.

A model that is trained on analysed states alone has never seen those to which its own errors lead, and may amplify what it
has not seen. With noise on the input and the target as it was, the loss rewards a step that takes out a departure from the
data. Source: Sanchez-Gonzalez et al. (2020), ICML, arXiv:2002.09405, who stabilised long simulations in this way.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from credit_like.nn.noise import NoiseKeys, absorb, standard_normal
from credit_like.nn.place import WHOLE, Place
from credit_like.state import Sample
from credit_like.stepper import Stepper

Places = tuple[Place, Place]
"""Of rows and of columns."""


def perturbed(sample: Sample, stepper: Stepper, key_B: Tensor, amplitude: float, places: Places) -> Sample:
    """Return a sample whose prognostic fields have normal noise of all scales, independent in every channel and frame.

    Its standard deviation is `amplitude` times that of the channel's change over one step, in the units in which the model
    predicts it. The noise depends on the key of the sample and on the position in the whole grid, of which the sample has
    the rows and columns at `places`. Targets and forcing are those of the data.
    """
    x_BCTHW = sample.prognostic
    channels, frames, rows, columns = x_BCTHW.shape[1:]
    wide = torch.promote_types(x_BCTHW.dtype, torch.float32)
    normal_BHWN = of_all_scales(key_B, (rows, columns), channels * frames, wide, places)
    normal_BCTHW = normal_BHWN.permute(0, 3, 1, 2).unflatten(1, (channels, frames))
    transforms = stepper.prognostic_transforms
    noisy = transforms.forward(x_BCTHW, torch) + amplitude * stepper.change_std[:, None] * normal_BCTHW
    return replace(sample, prognostic=transforms.inverse(noisy.to(x_BCTHW.dtype), torch))


def of_all_scales(
    key_B: Tensor, shape: tuple[int, int], channels: int, dtype: torch.dtype, places: Places = WHOLE
) -> Tensor:
    """Return normal numbers (B, H, W, channels) of variance 1 at the `places` of the whole image, shape = (H, W).

    They are the sum of noise that is constant in squares of 1, 2, 4, … points, up to those with all columns. Each has the same
    variance. Noise of single points alone has next to no part in the largest scales, of which a model would then not learn
    to take out departures.
    """
    octaves = ((places[1].whole or shape[1]) - 1).bit_length() + 1
    total = key_B.new_zeros((), dtype=dtype)
    for octave in range(octaves):
        size = 1 << octave
        rows, columns = (_squares(place, length, size) for place, length in zip(places, shape, strict=True))
        squares = (rows.number, columns.number)
        coarse = standard_normal(absorb(key_B, octave), squares, channels, dtype, (rows.place, columns.place))
        fine = coarse.repeat_interleave(size, 1).repeat_interleave(size, 2)
        total = total + fine[:, rows.part, columns.part]
    return total / math.sqrt(octaves)


class _Squares(NamedTuple):
    """The squares along one axis that contain a part of the image."""

    number: int
    place: Place
    part: slice
    """The points of the part among those of the squares."""


def _squares(place: Place, length: int, size: int) -> _Squares:
    """Return the squares of `size` points that contain the `length` points at `place`."""
    first, last = place.first // size, (place.first + length - 1) // size
    begin = place.first - first * size
    whole = -(-(place.whole or length) // size)
    return _Squares(last - first + 1, Place(first, whole), slice(begin, begin + length))


def key_of(keys: NoiseKeys, sample: Sample, step: int) -> Tensor:
    """Return the key (B,) of each sample's noise at an optimiser step."""
    keys.reseed("step", step)
    return keys(sample.index, torch.zeros_like(sample.index))
