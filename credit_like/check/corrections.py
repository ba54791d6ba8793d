"""Trial of corrections from outside: whether ranks that share the rows of a sample correct them as one rank does."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from credit_like import registry
from credit_like.context import Context
from credit_like.errors import UserError, of_another_rank, own_line, reason
from credit_like.nn.area import identity
from credit_like.schema.checks import shares_columns
from credit_like.transforms import Transforms

Gather = Callable[[Tensor], Tensor]
_TOLERANCE = 1e-2
"""Largest difference in standard deviations of the change over a step: more than rounding in fp32, less than what a mean over the
rows of one rank changes."""


def refuse_unshareable(context: Context) -> None:
    """Raise UserError for a correction from outside that gives these rows other values than one rank would.

    Each is built twice, for the rows and columns of this rank and for all, and corrects made-up fields. Collective over the ranks
    that share a sample; nothing is done without such ranks.
    """
    runtime = context.runtime
    if runtime.domain_size == 1:
        return
    for place, config in enumerate(context.experiment.physics):
        plugin = registry.of("physics", config)
        if not registry.is_foreign(plugin.__name__):
            continue
        try:
            problem = _problem(context, plugin, config)
        except (RuntimeError, ValueError, IndexError) as error:
            if of_another_rank(error):
                raise
            # At once, because other ranks may wait for this one in `reduce`.
            text = f"{own_line(error)}: {reason(error)},"
            raise _refusal(place, plugin, config, text) from error
        reports = [each for each in runtime.gather(problem) if each]
        if reports:
            raise _refusal(place, plugin, config, reports[0])


def _refusal(place: int, plugin: ModuleType, config: Any, got: str) -> UserError:
    return UserError(
        f"physics.{place}: expected a correction that gives a band of rows what it gives them in the whole field, got {got} from "
        f"{config.type} in {plugin.__file__}; take `rows` of what is given by row, add up means over the area with `reduce`, use "
        "no neighbouring rows, or set trainer.parallelism.domain to 1"
    )


@torch.no_grad()
def _problem(context: Context, plugin: ModuleType, config: Any) -> str:
    """Return what is different on this rank; empty if nothing is."""
    runtime, device = context.runtime, context.runtime.device
    before, after, forcing = _fields(context)
    n = context.variables.n("prognostic")
    wide = shares_columns(plugin)

    def corrected(rows: slice, columns: slice, ranks: int, reduce: Gather, whole_rows: Gather) -> Tensor:
        given: dict[str, Any] = {"rows": rows, "reduce": reduce}
        given |= {"columns": columns, "whole_rows": whole_rows, "column_ranks": ranks} if wide else {}
        fix = plugin.build(config, context.variables, context.store, context.statistics, **given).to(device)
        # Copies, because a correction may write to the prediction, of which the part of a single channel is a view.
        inputs = [
            x[..., rows, columns].clone(memory_format=torch.contiguous_format).to(device)
            for x in (after, before[:, :n], forcing)
        ]
        result: Tensor = fix(*inputs[: 3 if getattr(fix, "needs_forcing", False) else 2])
        return result.cpu()

    part = corrected(
        context.rows, context.columns, runtime.domain_shape[1], runtime.sum_over_domain, context.whole_rows
    )
    whole = corrected(slice(None), slice(None), 1, identity, identity)[..., context.rows, context.columns]
    if part.shape != whole.shape:
        return f"a shape of {tuple(part.shape)} instead of {tuple(whole.shape)}"
    # What is not finite, or does not change, in both is no difference.
    same = (part == whole) | (part.isnan() & whole.isnan())
    relative = torch.where(same, 0.0, (part - whole).abs() / (after - before).std((0, 2, 3), keepdim=True))
    relative = relative.nan_to_num(nan=float("inf"))
    largest = float(relative.max())
    return (
        f"a difference of {largest:.2g} standard deviations of the change over a step" if largest > _TOLERANCE else ""
    )


def _fields(context: Context) -> tuple[Tensor, Tensor, Tensor]:
    """Return a state before a step, the prediction after it, which changes every row by another mean, and forcing, (1, …, H, W)."""
    generator = torch.Generator().manual_seed(0)
    grid, outputs = context.store.grid, context.variables.outputs
    mean, std, change = (torch.from_numpy(x).float()[:, None, None] for x in context.statistics.select(outputs))
    change = torch.where(change.isfinite(), change, std)  # diagnostic channels have none
    shape = len(mean), grid.height, grid.width
    now = mean + 0.1 * std * torch.randn(shape, generator=generator)
    slope_H = torch.sin(torch.deg2rad(torch.as_tensor(grid.latitude, dtype=torch.float32)))
    after = now + change * (1 + slope_H[:, None] + 0.5 * torch.randn(shape, generator=generator))
    forcing = torch.from_numpy(context.statistics.select(context.variables.role("dynamic_forcing"))[0]).float()
    physical = [Transforms(outputs).inverse(x[None], torch) for x in (now, after)]
    return *physical, forcing[None, :, None, None].expand(-1, -1, grid.height, grid.width)
