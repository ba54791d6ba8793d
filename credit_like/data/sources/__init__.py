"""Sources of data: one module each, with a `Config` and `open_dataset`. A plug-in has the attributes of `SourcePlugin`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import xarray


class SourcePlugin(Protocol):
    """The module of a source; `Config` is a `Section` with its `type`."""

    Config: type[Any]

    def open_dataset(self, config: Any) -> xarray.Dataset:
        """Return all its variables, lazily read, in its own names.

        Dimensions among time, level, latitude (in either order) and longitude; units in the attributes. Raises UserError
        where there is nothing to read.
        """
