"""Trial of a loss on few numbers: whether ranks and micro-batches that share its work get the numbers of the whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from credit_like import registry
from credit_like.errors import UserError, own_line, reason
from credit_like.losses import LossConfig
from credit_like.losses._mean import is_by_point, loss_values, member_values
from credit_like.schema.losses import judges_members, summands

_SAMPLES, _ROWS = 2, 4
_TOLERANCE = 1e-4
"""Largest difference relative to the largest value: more than rounding in fp32, and less than what a mean over all changes."""


@dataclass(frozen=True)
class Shared:
    """What is computed in parts."""

    samples: bool
    """Whether the samples of a global batch are in several micro-batches or on several ranks."""
    rows: bool
    columns: bool


def refuse_unshareable(
    config: LossConfig, channels: int, grid: tuple[int, int], members: int, shared: Shared, device: torch.device
) -> None:
    """Raise UserError for a loss that gives other numbers in parts, or when it is called again. No communication.

    Each loss of a sum is tried by itself, on random errors of 2 samples and 4 rows of the grid (height, width), or on all rows
    if it needs these and they are not shared. A loss of a sum must not write to the errors, which the next one gets.
    """
    terms = summands(config)
    if len(terms) == 1 and not (shared.samples or shared.rows or shared.columns):
        return
    for each in terms:
        few = min(_ROWS, grid[0])
        try:
            _try(each, channels, (few, grid[1]), members, shared, device, len(terms) > 1)
        except UserError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            if shared.rows:
                raise UserError(
                    f"{_expected(each, 'works on bands of rows', 'trainer.parallelism.domain')}, got {own_line(error)} for {few} "
                    f"of {grid[0]} rows: {reason(error)}; change that file, or set domain to 1"
                ) from error
            _try(each, channels, grid, members, shared, device, len(terms) > 1)


@torch.no_grad()
def _try(
    config: LossConfig,
    channels: int,
    grid: tuple[int, int],
    members: int,
    shared: Shared,
    device: torch.device,
    in_sum: bool,
) -> None:
    """Compare the values of a loss with those of parts."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*leading: int) -> Tensor:
        """Return random numbers (…, C, h, W) of another size in every row and sample."""
        x = torch.randn(*leading, channels, *grid, generator=generator)
        x *= torch.arange(1.0, 1 + _SAMPLES).view(-1, *[1] * (x.ndim - 1))
        return (x * torch.linspace(1, _ROWS, grid[0])[:, None]).to(device)

    of_members = judges_members(config)
    error = numbers(_SAMPLES, members) if of_members else numbers(_SAMPLES)
    target = numbers(_SAMPLES)

    def values(samples: slice = slice(None), rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        # A training computes its errors anew for each call.
        given = [x[samples, ..., rows, columns].clone() for x in (error, target)]
        result = member_values(config, given[0], ()) if of_members else loss_values(config, *given)
        if in_sum and any(x._version for x in given):
            raise UserError(
                f"{_expected(config, 'leaves the errors and the target as they are', 'the other losses of a sum')}, got one that "
                "writes to them; use no operation in place, such as `clamp_` or `-=`, or copy them first"
            )
        return result

    def differs(parts: list[Tensor], dim: int) -> bool:
        other = torch.cat(parts, dim)
        # A loss may have no finite value for some of the errors; then it has none in parts either.
        size = whole.nan_to_num(0, 0, 0).abs().max()
        return not torch.allclose(other, whole, rtol=0, atol=_TOLERANCE * float(size), equal_nan=True)

    whole = values()
    if not (shared.samples or shared.rows or shared.columns):
        return
    if differs([values()], 0):
        raise UserError(
            f"{_expected(config, 'gives the same values for the same errors', 'other ranks and restarts')}, got others when it was "
            "called again; keep nothing between calls, and draw no random numbers"
        )
    halves = {
        dim: (slice(size // 2), slice(size // 2, None)) for dim, size in zip((0, 2, 3), (_SAMPLES, *grid), strict=True)
    }
    if shared.samples and differs([values(samples=part) for part in halves[0]], 0):
        raise UserError(
            f"{_expected(config, 'treats every sample by itself', 'micro-batches and data ranks')}, got other values for two "
            "samples together than for each of them; use no mean, norm or quantile of several samples, or set "
            "trainer.micro_batch_size to the global_batch_size on one data rank"
        )
    if shared.rows and differs([values(rows=part) for part in halves[2]], -2):
        raise UserError(
            f"{_expected(config, 'treats every row by itself', 'trainer.parallelism.domain')}, got other values for two bands of "
            "rows than for both together; use no difference, mean, norm or transform of several rows, or set domain to 1"
        )
    if shared.columns and is_by_point(config) and differs([values(columns=part) for part in halves[3]], -1):
        raise UserError(
            f"{_expected(config, 'treats every point by itself', 'by_point = True')}, got other values for two bands of columns "
            "than for both together; remove by_point"
        )


def _expected(config: LossConfig, what: str, because: str) -> str:
    module = registry.of("loss", config)
    return f"loss.type: expected a loss that {what} (for {because}), {module.__file__}"
