"""Writers of forecast files, and the options that all formats share. A plug-in has the attributes of `WriterPlugin`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import Field

from credit_like.schema.base import Section, UserPath
from credit_like.schema.inference import Lead

if TYPE_CHECKING:
    from pathlib import Path

    from credit_like.inference.layout import ForecastLayout
    from credit_like.inference.writers._base import Writer


class WriterConfig(Section):
    """Options of the forecast files; by default every field is written."""

    path: UserPath | None = None
    """Folder of the forecasts, by default `save_loc/forecasts`."""
    variables: tuple[str, ...] = ()
    """Predicted variables to write. Default: all."""
    levels: tuple[float, ...] = ()
    """Levels to write, as in `data.levels`. Default: all."""
    leads: tuple[Lead, ...] = ()
    """Leads to write, as steps or durations."""
    chunk_mib: float = Field(default=4.0, gt=0, le=1024)
    """Largest chunk size; one chunk holds whole fields (in zarr the part of a rank, if several share a field), then levels, then
    leads as long as they fit."""
    flavour: Literal["weatherbench2", "cf"] = "weatherbench2"
    """`weatherbench2`: dimensions time and prediction_timedelta; `cf`: forecast_reference_time and forecast_period."""


class WriterPlugin(Protocol):
    """Interface of the module of a format; `Config` is a `WriterConfig` with its `type`.

    A module sets `by_member = True` if its `Writer` does; the jobs of a rollout then share the members of one initial time.
    """

    Config: type[Any]

    def open_writer(self, config: Any, layout: ForecastLayout, folder: Path) -> Writer:
        """Return the writer of a run's forecasts into `folder`."""

    def finished_path(self, folder: Path) -> Path:
        """Return the path of the forecasts of a finished run."""
