"""One netCDF-4 file per initial time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import netCDF4
import numpy as np
from xarray.conventions import cf_encoder

from credit_like.data.files.netcdf_files import File, written
from credit_like.inference.layout import ForecastLayout
from credit_like.inference.writers._base import Fields, FilePerInit, ForecastKey


class NetcdfWriter(FilePerInit):
    """Writer of `<initial time>.nc.part`, which is renamed when all its members and leads are written."""

    suffix = ".nc"
    _files: dict[int, File]

    def __init__(self, layout: ForecastLayout, folder: Path, chunk_bytes: int, compression: int) -> None:
        super().__init__(layout, folder, chunk_bytes)
        self.compression = compression

    def _store(self, name: str, places: Sequence[ForecastKey], leads: slice, values: Fields) -> None:
        for (init, member), part in zip(places, values, strict=True):
            where = (0, member) if self.layout.members > 1 else (0,)
            with written(self._partial(init)):
                if init not in self._files:
                    self._create(init)
                with self._files[init].opened() as file:
                    file[name][(*where, leads)] = part

    def complete(self, init: int) -> None:
        with written(self._partial(init)):
            super().complete(init)

    def _create(self, init: int) -> None:
        layout = self.layout
        self.open()
        coordinates = layout.coordinates(layout.init[init : init + 1])
        variables, attributes = cf_encoder(coordinates.variables, coordinates.attrs)
        self._files[init] = File(self._partial(init), "w", chunk_cache=False)
        with self._files[init].opened() as file:
            file.set_auto_mask(False)
            file.setncatts(attributes)
            for name, size in coordinates.sizes.items():
                file.createDimension(str(name), size)
            for name, variable in variables.items():
                created = file.createVariable(str(name), variable.dtype, variable.dims)
                created.setncatts(variable.attrs)
                created[...] = variable.values
            for name in layout.chosen:
                self._define(file, name)

    def _define(self, file: netCDF4.Dataset, name: str) -> None:
        layout = self.layout
        variable = file.createVariable(  # type: ignore[call-overload]
            name,
            "f4",
            layout.variable_dims(name),
            fill_value=np.float32("nan"),
            zlib=self.compression > 0,
            complevel=self.compression,
            chunksizes=self.chunks(name),
        )
        variable.setncatts(layout.attrs_of(name))
