"""Derived fields beside the predicted ones, on the part of the grid that a rank has."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from credit_like.context import Context
from credit_like.derive.fields import Derivation, scored_derivation
from credit_like.grid import Grid
from credit_like.variables import Variable, Variables


class DerivedFields:
    """The fields of `evaluation.derive` (else of `inference.derive`) for scores during training; none without the key.

    Fields that need neighbouring points are computed from the whole grid, so that their values are the same in every
    layout. Raises UserError for fields that the model cannot supply, or data in other units than they are computed from.
    """

    def __init__(self, context: Context) -> None:
        self.derivation: Derivation | None = scored_derivation(context.experiment, context.variables)
        self.store, self.runtime = context.store, context.runtime
        if self.derivation is not None:
            self.derivation.check_units(self.store)
        self.part = (context.rows, context.columns)
        self.slices = Variables.slices(context.variables.outputs)
        derived = self.derivation.outputs if self.derivation else ()
        self.outputs: tuple[Variable, ...] = (*context.variables.outputs, *derived)
        self.needs_all = self.derivation is not None and self.derivation.needs_neighbours
        self.read_part = (slice(None), slice(None)) if self.needs_all else self.part
        """Rows and columns of the truth from which the fields on this rank's part are computed."""

    def __len__(self) -> int:
        return sum(map(len, self.outputs))

    def of_part(self, own_BCHW: Tensor) -> Tensor:
        """Return `append` of fields of which each domain rank has its own part."""
        if not self.needs_all or self.runtime.domain_size == 1:
            return self.append(own_BCHW)
        whole = own_BCHW.new_zeros((*own_BCHW.shape[:-2], self.store.grid.height, self.store.grid.width))
        whole[..., *self.part] = own_BCHW
        return self.append(self.runtime.sum_over_domain(whole))

    def append(self, fields_BCHW: Tensor) -> Tensor:
        """Return predicted and derived fields on this rank's part, from predicted ones on `read_part`.

        What is derived from missing points is missing.
        """
        if self.derivation is None:
            return fields_BCHW
        by_name = {name: fields_BCHW[:, channels] for name, channels in self.slices.items()}
        derived = self.derivation(by_name, self._ground, self._grid)
        result = torch.cat([fields_BCHW, *(derived[v.name].to(fields_BCHW) for v in self.derivation.outputs)], 1)
        return result[..., *self.part] if self.needs_all else result

    def valid(self, mask_CHW: Tensor, position: int) -> Tensor:
        """Return where predicted and derived fields have values, on the whole grid.

        `mask_CHW` is that of the predicted ones. Derived fields have a value where that of the analysis at `position` is one.
        """
        if self.derivation is None:
            return mask_CHW
        fields = torch.from_numpy(self.store.read(self.outputs[: len(self.slices)], [position]))
        by_name = {name: torch.where(mask_CHW, fields, torch.nan)[:, part] for name, part in self.slices.items()}
        ground = self.derivation.ground(self.store)
        whole = None if ground is None else torch.from_numpy(ground)
        derived = self.derivation(by_name, whole, self.store.grid)
        return torch.cat([mask_CHW, *(derived[v.name][0].isfinite() for v in self.derivation.outputs)])

    @cached_property
    def _grid(self) -> Grid:
        rows, columns = self.read_part
        return Grid(self.store.grid.latitude[rows], self.store.grid.longitude[columns])

    @cached_property
    def _ground(self) -> Tensor | None:
        ground = None if self.derivation is None else self.derivation.ground(self.store)
        if ground is None:
            return None
        return torch.from_numpy(np.ascontiguousarray(ground[self.read_part])).to(self.runtime.device)
