"""The keys `inference.derive` and `evaluation.derive`: fields that follow from predicted ones."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from credit_like.errors import UserError
from credit_like.schema.base import Section

DerivedField = Literal[
    "geopotential",
    "mean_sea_level_pressure",
    "wind_speed",
    "relative_humidity",
    "vorticity",
    "divergence",
    "total_column_water",
]


class Derive(Section):
    """Fields that follow from predicted ones; in a file also a list of their names and of mappings of the other keys."""

    fields: tuple[DerivedField, ...] = ()
    """Names of the fields. Those on levels are on `pressure_levels` if given, else on the levels of the model."""
    pressure_levels: tuple[float, ...] = Field(default=())
    """Pressure levels in hPa. All predicted variables on levels are interpolated to them too, as `<name>_pl`."""
    model_levels: str | dict[Literal["a", "b", "lev"], tuple[float, ...]] = "pressure"
    """Meaning of `data.levels`: `pressure` in hPa; `era5-137` for numbers of ERA5's 137 model levels; or a file with
    coefficients of hybrid levels (`a_half`, `b_half`; or `hyai`, `hybi`), or lists `{a: […], b: […]}` of them. These levels
    are counted from 1 at the top, or named by the `lev` of the file or list, or by their pressures in hPa over a surface at
    1000 hPa."""
    conventions: Literal["standard", "credit"] = "standard"
    """`credit` gives the numbers of NCAR CREDIT, which places model levels elsewhere within their layers and takes
    sea-level pressure from the temperature at 2 m."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        keys = handler.resolve_ref_schema(schema)["properties"]
        others = {key: value for key, value in keys.items() if key != "fields"}
        mapping = {"type": "object", "properties": others, "additionalProperties": False}
        return {"anyOf": [{"type": "array", "items": {"anyOf": [keys["fields"]["items"], mapping]}}, schema]}

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        """Convert `[{pressure_levels: [850, 500]}, geopotential]` to a mapping."""
        if not isinstance(value, list | tuple):
            return value
        result: dict[str, Any] = {"fields": [item for item in value if not isinstance(item, dict)]}
        for item in value:
            if isinstance(item, dict):
                if twice := result.keys() & item.keys():
                    raise UserError(f"expected each key once, got {', '.join(sorted(twice))} more than once")
                result.update(item)
        return result

    @model_validator(mode="after")
    def _sensible(self) -> Derive:
        if any(level <= 0 for level in self.pressure_levels) or len(set(self.pressure_levels)) < len(
            self.pressure_levels
        ):
            shown = ", ".join(f"{level:g}" for level in self.pressure_levels)
            raise UserError(f"expected different pressure levels above 0 hPa, got {shown}")
        if len(set(self.fields)) < len(self.fields):
            raise UserError(f"expected each field once, got {', '.join(self.fields)}")
        return self
