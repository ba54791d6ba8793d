"""Noise on the fields from which a training step forecasts, so that the model learns to return to the states that it knows.

A model that is trained on analysed states alone has never seen those to which its own errors lead, and may amplify what it
has not seen. With noise on the input and the target as it was, the loss rewards a step that takes out a departure from the
data. Source: Sanchez-Gonzalez et al. (2020), ICML, arXiv:2002.09405, who stabilised long simulations in this way.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from credit_like.nn.noise import NoiseKeys, absorb, standard_normal
from credit_like.state import Sample
from credit_like.stepper import Stepper


def perturbed(sample: Sample, stepper: Stepper, key_B: Tensor, amplitude: float, first_row: int) -> Sample:
    """Return a sample whose prognostic fields have normal noise of all scales, independent in every channel and frame.

    Its standard deviation is `amplitude` times that of the channel's change over one step, in the units in which the model
    predicts it. The noise depends on the key of the sample and on the position in the whole grid, of which the sample has
    the rows from `first_row` on. Targets and forcing are those of the data.
    """
    x_BCTHW = sample.prognostic
    channels, frames, rows, columns = x_BCTHW.shape[1:]
    wide = torch.promote_types(x_BCTHW.dtype, torch.float32)
    normal_BHWN = of_all_scales(key_B, first_row, rows, columns, channels * frames, wide)
    normal_BCTHW = normal_BHWN.permute(0, 3, 1, 2).unflatten(1, (channels, frames))
    transforms = stepper.prognostic_transforms
    noisy = transforms.forward(x_BCTHW, torch) + amplitude * stepper.change_std[:, None] * normal_BCTHW
    return replace(sample, prognostic=transforms.inverse(noisy.to(x_BCTHW.dtype), torch))


def of_all_scales(key_B: Tensor, first_row: int, rows: int, columns: int, channels: int, dtype: torch.dtype) -> Tensor:
    """Return normal numbers (B, rows, columns, channels) of variance 1, for the rows of an image from `first_row` on.

    They are the sum of noise that is constant in squares of 1, 2, 4, … points, up to those with all columns. Each has the same
    variance. Noise of single points alone has next to no part in the largest scales, of which a model would then not learn
    to take out departures.
    """
    octaves = (columns - 1).bit_length() + 1
    total = key_B.new_zeros((), dtype=dtype)
    for octave in range(octaves):
        size = 1 << octave
        first, last = first_row // size, (first_row + rows - 1) // size
        key = absorb(key_B, octave)
        coarse = standard_normal(key, first, last - first + 1, -(-columns // size), channels, dtype)
        fine = coarse.repeat_interleave(size, 1).repeat_interleave(size, 2)
        begin = first_row - first * size
        total = total + fine[:, begin : begin + rows, :columns]
    return total / math.sqrt(octaves)


def key_of(keys: NoiseKeys, sample: Sample, step: int) -> Tensor:
    """Return the key (B,) of each sample's noise at an optimiser step."""
    keys.reseed("step", step)
    return keys(sample.index, torch.zeros_like(sample.index))
