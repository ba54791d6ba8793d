"""Files that forecasts are written to: what all formats have in common. A plug-in has the attributes of `WriterPlugin`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import Field

from credit_like.schema.base import Section
from credit_like.schema.inference import Lead

if TYPE_CHECKING:
    from pathlib import Path

    from credit_like.inference.layout import Layout
    from credit_like.inference.writers._base import Writer


class WriterConfig(Section):
    """What to write and where; every field is written if nothing is chosen."""

    path: str | None = None
    """Folder of the forecasts; `save_loc/forecasts` if not given."""
    variables: tuple[str, ...] = ()
    levels: tuple[float, ...] = ()
    leads: tuple[Lead, ...] = ()
    """Leads to keep, as steps or durations."""
    chunk_mib: float = Field(default=4.0, gt=0)
    """Largest chunk; one chunk holds whole fields, then levels, then leads as long as they fit."""
    flavour: Literal["weatherbench2", "cf"] = "weatherbench2"
    """`weatherbench2`: dimensions time and prediction_timedelta; `cf`: forecast_reference_time and forecast_period."""


class WriterPlugin(Protocol):
    """The module of a format; `Config` is a `WriterConfig` with its `type`."""

    Config: type[Any]

    def open_writer(self, config: Any, layout: Layout, folder: Path) -> Writer:
        """Return the writer of a run's forecasts into `folder`."""

    def finished_path(self, folder: Path) -> Path:
        """Return what a finished run leaves there."""
