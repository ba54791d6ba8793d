"""Sources of data, one module each with a `Config` and `open_dataset`. A plug-in has the attributes of `SourcePlugin`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import xarray


class SourcePlugin(Protocol):
    """Interface of a source module; `Config` is a `Section` with its `type`."""

    Config: type[Any]

    def open_dataset(self, config: Any) -> xarray.Dataset:
        """Return all variables of the source, read lazily, under its own names.

        Dimensions are among time, level, latitude (in either order) and longitude; units are in the attributes. Raises
        UserError if there is nothing to read.
        """
