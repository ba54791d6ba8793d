"""The mean over area, variables and batch that all losses share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor, nn

from credit_like import registry
from credit_like.data.statistics import Statistics
from credit_like.errors import UserError
from credit_like.grid import Grid
from credit_like.losses import LossConfig
from credit_like.nn.area import AreaMean, identity
from credit_like.schema.losses import judges_members, summands
from credit_like.transforms import Transforms
from credit_like.variables import Variable, Variables


class AreaLoss(nn.Module):
    """Scalar loss of a predicted step.

    loss = Σ_c v_c · mean_area(ℓ(e_c / s_c)) / Σ_c v_c, averaged over the batch, with ℓ the `pointwise` or `rowwise` of the
    loss plug-in, v the variable weights, s the channel's scale. Of a variable with a transform, e is the error of the
    transformed values. Points without data (`valid` False) are excluded from the mean. Each domain rank computes its part.
    `of_members` of a loss of ensembles takes the place of ℓ and gets the errors of all members of a sample. `others` yields
    what other ranks have in place of a tensor, where they have some of the members; each rank then computes its part.
    `whole_rows` gives a loss that is no function of each point alone all columns of this rank's rows; of its values, this
    rank counts those at its own `columns`.
    """

    scale: Tensor
    channel_weights: Tensor
    valid: Tensor
    row_valid: Tensor | None

    def __init__(
        self,
        config: LossConfig,
        variables: Variables,
        statistics: Statistics,
        grid: Grid,
        rows: slice = slice(None),
        others: Callable[[Tensor], Iterator[Tensor]] | None = None,
        columns: slice = slice(None),
        whole_rows: Callable[[Tensor], Tensor] = identity,
    ) -> None:
        super().__init__()
        self.config, self.others = config, others
        # A loss that is no function of each point alone gets whole rows.
        by_point = all(map(is_by_point, summands(config)))
        self.columns, self.whole_rows = (slice(None), identity) if by_point else (columns, whole_rows)
        self.module = loss_module(config)
        self.rowwise = hasattr(self.module, "rowwise")
        self.of_members = self.module.of_members if judges_members(config) else None
        self.transforms = Transforms(variables.outputs)
        known = [variable.name for variable in variables.outputs]
        for name in config.variable_weights:
            if name not in known:
                raise UserError(
                    f"expected loss.variable_weights of predicted variables, got {name!r}"
                    f"{registry.did_you_mean(name, known)}"
                )
        levels = {level for variable in variables.outputs for level in variable.levels}
        for level in config.level_weights:
            if level not in levels:
                shown = ", ".join(f"{each:g}" for each in sorted(levels)) or "none"
                raise UserError(f"expected loss.level_weights of predicted levels ({shown}), got {level:g}")
        _, std, change_std = statistics.select(variables.outputs)
        prognostic = variables.n("prognostic")
        scale = np.concatenate([(change_std if config.scale == "change" else std)[:prognostic], std[prognostic:]])
        weights = [
            weight * config.level_weights.get(level, 1.0)
            for v in variables.outputs
            for level, weight in zip(v.levels or (math.nan,), _weights_of(v, config), strict=True)
        ]
        mask = torch.from_numpy(statistics.mask(variables.outputs))
        row_weights = grid.latitude_weights() if config.latitude_weights else np.ones(grid.height)
        self.area = AreaMean(torch.from_numpy(row_weights)[:, None] * mask, rows, columns=columns)
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float32)[:, None, None], persistent=False)
        self.register_buffer("channel_weights", torch.tensor(weights, dtype=torch.float32), persistent=False)
        self.total_weight = float(np.sum(weights))
        self.register_buffer("valid", mask[:, rows, columns], persistent=False)
        self.register_buffer("row_valid", None if by_point or mask.all() else mask[:, rows], persistent=False)

    def forward(self, prediction_BCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Return this rank's part of the loss of fields in physical units, as a scalar in fp32 or wider.

        The prediction may hold K members of each sample of the target, one after the other along the batch. The parts of
        ranks that have other rows, columns or members add up to the loss.
        """
        weighted = self.per_channel(prediction_BCHW, target_BCHW) * self.channel_weights
        return weighted.sum(-1).mean() / self.total_weight

    def per_channel(self, prediction_BCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Return (B, C): this rank's part of the area mean of each channel.

        Raises UserError for several members and a loss that is not of ensembles.
        """
        of_members = self.of_members
        # Missing points are masked before any non-linear operation, because the gradient of a NaN is NaN even under a
        # zero weight.
        if self.transforms:
            prediction_BCHW = self.transforms.forward(prediction_BCHW, torch)
            target_BCHW = self.transforms.forward(target_BCHW, torch)
        if of_members is None:
            if len(prediction_BCHW) != len(target_BCHW):
                name = self.module.__name__.rpartition(".")[2]
                raise UserError(
                    f"loss.type: expected a loss of ensembles for several members, got {name}; change it to crps"
                )
            error = self._scaled(prediction_BCHW - target_BCHW)
            target = self._scaled(target_BCHW) if self.rowwise else None
            return self._mean(loss_values(self.config, error, target, self.row_valid))
        members_BKCHW = prediction_BCHW.unflatten(0, (len(target_BCHW), -1))
        error = self._scaled(members_BKCHW - target_BCHW[:, None])
        others = () if self.others is None else (self.others(error),)
        return self._mean(member_values(self.config, error, others, self.row_valid))

    def _scaled(self, x: Tensor) -> Tensor:
        """Return x as a loss gets it: divided by the channel's scale and 0 at points without data."""
        return self.whole_rows(torch.where(self.valid, x, 0) / self.scale)

    def _mean(self, values_BCHW: Tensor) -> Tensor:
        """Return this rank's part of the area mean of what the loss returned."""
        return self.area.part(values_BCHW[..., self.columns])

    def at_lead(self, loss: Tensor, lead: int, leads: int) -> Tensor:
        """Return the loss of autoregressive step `lead` = 0, 1, … of `leads`, weighted such that a mean over leads remains."""
        if self.config.lead_weights is None:
            return loss
        weights = self.config.lead_weights[:leads]
        return loss * (weights[lead] * leads / sum(weights))


def _weights_of(variable: Variable, config: LossConfig) -> Sequence[float]:
    """Return the weight of each channel of a variable. Raises UserError for as many as it does not have."""
    given = config.variable_weights.get(variable.name, 1.0)
    weights = given if isinstance(given, tuple) else (given,) * len(variable)
    if len(weights) != len(variable):
        raise UserError(
            f"loss.variable_weights.{variable.name}: expected a number or {len(variable)}, one for each level, got "
            f"{len(weights)}; change their number"
        )
    return weights


def loss_values(config: LossConfig, error: Tensor, target: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
    """Return the loss at each point: by `rowwise` of its plug-in, which needs the target, or else by `pointwise`."""
    module = loss_module(config)
    rowwise = getattr(module, "rowwise", None)
    if rowwise is None:
        values: Tensor = module.pointwise(config, error)
    else:
        values = rowwise(config, error, target, **_valid(module, valid))
    return _of_shape(values, error.shape, module)


def member_values(
    config: LossConfig, error_BKCHW: Tensor, others: tuple[Iterable[Tensor], ...], valid: Tensor | None = None
) -> Tensor:
    """Return a loss of ensembles at each point; `others` is empty or holds the errors of other ranks' members."""
    module = loss_module(config)
    values: Tensor = module.of_members(config, error_BKCHW, *others, **_valid(module, valid))
    return _of_shape(values, (error_BKCHW.shape[0], *error_BKCHW.shape[2:]), module)


def _of_shape(values: Tensor, shape: Sequence[int], module: ModuleType) -> Tensor:
    """Return the values of a loss. Raises UserError if they are not one for each point."""
    if not isinstance(values, Tensor) or values.shape != tuple(shape):
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise UserError(
            f"loss.type: expected a loss that returns a value for each point, {tuple(shape)} of (samples, channels, rows, "
            f"columns), got {got} from {module.__file__}; take no mean or sum, which is taken afterwards, and repeat what "
            "holds for several points (expand)"
        )
    return values


def _valid(module: ModuleType, valid: Tensor | None) -> dict[str, Tensor | None]:
    return {"valid": valid} if getattr(module, "takes_valid", False) is True else {}


def is_by_point(config: LossConfig) -> bool:
    """Return whether a loss declares that its value at a point depends on that point alone, so that it needs no other columns."""
    return getattr(loss_module(config), "by_point", False) is True


def loss_module(config: LossConfig) -> ModuleType:
    """Return the plug-in module of a loss configuration."""
    return registry.of("loss", config)
