"""Conservation of the global budget of total energy.

The total energy of the air per mass, on a level, is

    e = c_p T + L q + Φ_s + (u² + v²) / 2,   c_p = (1 − q) c_pd + q c_pv,

with latent heat L and surface geopotential Φ_s, and the energy of a column is E = ∫ e dp / g. Over one step of Δt the
global mean of E changes by what enters at the top and leaves at the bottom,

    ⟨E⟩_due = ⟨E⟩_before + Δt ⟨R_top − F_surface⟩,

with both fluxes positive downward. All energies are multiplied by r = ⟨E⟩_due / ⟨E⟩_after, and temperature alone carries
the change:

    T ← T + (r − 1) e / c_p.

`top` and `surface` list the fluxes that the model predicts or is given as forcing, at the time before the step: net ones
(`down: [toa_net_solar, toa_net_thermal]`), or those of either direction (`down: [toa_incident_solar]`,
`up: [toa_reflected_solar, outgoing_longwave]`). Both forms are found in Sha et al. (2025), arXiv:2501.05648, and in CREDIT,
whose constants are used: c_pd = 1004.64 and c_pv = 1810 J kg⁻¹ K⁻¹, L = 2.501e6 J kg⁻¹ (Harrop et al., 2022, J. Climate 35,
2895-2917).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import model_validator

from credit_like.data.aliases import find as find_alias
from credit_like.data.declared import check_sums, check_units
from credit_like.errors import UserError
from credit_like.physics._column import GRAVITY, ColumnConfig, channel_of, channels_of, check_column, layers
from credit_like.schema.base import Section
from credit_like.variables import Variables

if TYPE_CHECKING:
    from torch import Tensor, nn

    from credit_like.data.statistics import Statistics
    from credit_like.data.store import FieldStore

CP_DRY, CP_VAPOUR, LATENT_HEAT = 1004.64, 1810.0, 2.501e6


class Fluxes(Section):
    """Variables of energy fluxes, by direction."""

    down: tuple[str, ...] = ()
    """Variables that are positive downward."""
    up: tuple[str, ...] = ()
    """Variables that are positive upward."""


shares_columns = True
"""See `credit_like.physics`."""


class Config(ColumnConfig):
    """Names of variables, the positions of the layers, and the fluxes at top and surface."""

    type: Literal["energy"] = "energy"
    temperature: str = "temperature"
    """Predicted temperature in K, which is corrected."""
    u: str = "u_component_of_wind"
    """Predicted eastward wind in m/s."""
    v: str = "v_component_of_wind"
    """Predicted northward wind in m/s."""
    surface_geopotential: str = "geopotential_at_surface"
    """A static variable in m² s⁻²."""
    top: Fluxes = Fluxes(down=("top_net_solar_radiation", "top_net_thermal_radiation"))
    """Fluxes at the top of the atmosphere."""
    surface: Fluxes = Fluxes(
        down=(
            "surface_net_solar_radiation",
            "surface_net_thermal_radiation",
            "surface_sensible_heat_flux",
            "surface_latent_heat_flux",
        )
    )
    """Fluxes at the surface: radiation, sensible and latent heat; all of ERA5's are positive downward."""
    flux_units: Literal["J m-2", "W m-2"] = "J m-2"
    """`J m-2` where values are sums over one time step, `data.timestep`."""

    @model_validator(mode="after")
    def _complete(self) -> Config:
        for key in ("top", "surface"):
            if not (fluxes := getattr(self, key)).down and not fluxes.up:
                raise ValueError(f"{key}: expected at least one flux, got none; list them under `down` or `up`")
        if self.column_water is not None:
            raise ValueError("column_water: expected none, since energy is summed over levels; remove it")
        return self


@dataclass(frozen=True)
class Places:
    """Channels of the budget's terms, and Δa (Pa) and Δb of each layer."""

    temperature: slice
    humidity: slice
    u: slice
    v: slice
    pressure: int | None
    """None on pressure levels, where layers do not depend on it."""
    delta_a: tuple[float, ...]
    delta_b: tuple[float, ...]
    geopotential: int
    """Among the static channels."""
    predicted: tuple[tuple[int, float], ...]
    """Output channels of fluxes, with the sign of their contribution to the air."""
    forced: tuple[tuple[int, float], ...]
    """The same among the channels of dynamic forcing."""


def find(config: Config, variables: Variables) -> Places:
    """See `credit_like.physics`."""
    prognostic, static = variables.role("prognostic"), variables.role("static")
    humidity, delta_a, delta_b = layers(config, variables)
    at = {name: channels_of(getattr(config, name), prognostic, f"physics.{name}") for name in ("temperature", "u", "v")}
    slices = Variables.slices(prognostic)
    first = {slices[variable.name].start: variable for variable in prognostic}
    for name, where in at.items():
        if first[where.start].levels != first[humidity.start].levels:
            raise UserError(
                f"physics.{name}: expected a variable on the levels of {config.humidity} "
                f"({first[humidity.start].levels_text}), got {getattr(config, name)!r} on {first[where.start].levels_text}, "
                "change it"
            )
    pressure = None
    if delta_b.any():
        pressure = channel_of(config.surface_pressure, prognostic, "physics.surface_pressure")
    geopotential = channel_of(config.surface_geopotential, static, "physics.surface_geopotential")
    predicted: dict[int, float] = {}
    forced: dict[int, float] = {}
    forcing = variables.role("dynamic_forcing")
    given = Variables.slices(forcing)
    for name, sign, key in _fluxes(config):
        among, terms = (
            ([*variables.outputs, *forcing], predicted) if find_alias(name, given) is None else (forcing, forced)
        )
        channel = channel_of(name, among, key)
        if channel in terms:
            raise UserError(f"{key}: expected each flux once, got {name!r} more than once; remove the others")
        terms[channel] = sign
    return Places(
        at["temperature"], humidity, at["u"], at["v"], pressure, tuple(delta_a.tolist()), tuple(delta_b.tolist()),
        geopotential, tuple(predicted.items()), tuple(forced.items()),
    )  # fmt: skip


def _fluxes(config: Config) -> Iterator[tuple[str, float, str]]:
    """Yield name, sign of the contribution to the energy of the air, and key of each flux."""
    for key, fluxes, sign in (("top", config.top, 1.0), ("surface", config.surface, -1.0)):
        for name in fluxes.down:
            yield name, sign, f"physics.{key}.down"
        for name in fluxes.up:
            yield name, -sign, f"physics.{key}.up"


def check_data(config: Config, store: FieldStore) -> None:
    """Raise UserError for data in other units than the correction counts on."""
    wanted = {"temperature": "K", "u": "m s-1", "v": "m s-1", "surface_geopotential": "m2 s-2"}
    for key, unit in wanted.items():
        check_units(store, f"physics.{key}", getattr(config, key), unit)
    for name, _, key in _fluxes(config):
        check_units(store, key, name, config.flux_units, other="it or flux_units")
        check_sums(store, key, name, "W m-2")
    check_column(config, store)


def build(config: Config, variables: Variables, store: FieldStore, statistics: Statistics, **layout: Any) -> nn.Module:
    """Build the correction; the arguments are those of every kind (see `credit_like.physics`)."""
    import torch

    from credit_like.nn.constants import on_device
    from credit_like.physics._fix import ForcedFix

    p = find(config, variables)
    scale = 1.0 if config.flux_units == "J m-2" else float(store.step_seconds)
    rows, columns = (layout.get(key, slice(None)) for key in ("rows", "columns"))
    surface_HW = torch.from_numpy(store.static(rows, columns)[p.geopotential])

    def per_mass(x_BCHW: Tensor, surface_HW: Tensor) -> tuple[Tensor, Tensor]:
        """Return energy per mass and heat capacity on each level, (B, L, H, W), float64."""
        t, q, u, v = (x_BCHW[:, where].double() for where in (p.temperature, p.humidity, p.u, p.v))
        q = q / config.humidity_scale
        heat_capacity = (1 - q) * CP_DRY + q * CP_VAPOUR
        return heat_capacity * t + LATENT_HEAT * q + surface_HW + (u**2 + v**2) / 2, heat_capacity

    def column(e_BLHW: Tensor, x_BCHW: Tensor) -> Tensor:
        """Return ∫ e dp / g, (B, H, W) in J m⁻²."""
        delta_a, delta_b = (
            on_device(values, torch.float64, x_BCHW.device)[:, None, None] for values in (p.delta_a, p.delta_b)
        )
        thickness = delta_a if p.pressure is None else delta_a + delta_b * x_BCHW[:, p.pressure, None].double()
        return (e_BLHW * thickness).sum(1) / GRAVITY

    def net(terms: Sequence[tuple[int, float]], x_BCHW: Tensor) -> Tensor | float:
        """Return the energy that the fluxes bring into the column in one step, (B, H, W) in J m⁻²."""
        return sum((sign * scale * x_BCHW[:, channel].double() for channel, sign in terms), start=0.0)

    def correct(
        after_BCHW: Tensor, before_BCHW: Tensor, mean: Callable[[Tensor], Tensor], forcing_BCHW: Tensor
    ) -> Tensor:
        surface = cast("Tensor", module.surface_HW).double()
        before, _ = per_mass(before_BCHW, surface)
        after, heat_capacity = per_mass(after_BCHW, surface)
        brought = net(p.predicted, after_BCHW) + net(p.forced, forcing_BCHW)
        ratio = mean(column(before, before_BCHW) + brought) / mean(column(after, after_BCHW))
        result = after_BCHW.clone()
        change = (ratio - 1)[:, None] * after / heat_capacity
        result[:, p.temperature] = (after_BCHW[:, p.temperature] + change).to(after_BCHW.dtype)
        return result

    changes = {config.temperature: p.temperature}
    surface = (*(channel for channel, _ in p.predicted), *([] if p.pressure is None else [p.pressure]))
    budget = (p.temperature, p.humidity, p.u, p.v, *(slice(channel, channel + 1) for channel in surface))
    module = ForcedFix(correct, variables, store, statistics, config=config, changes=changes, budget=budget, **layout)
    module.register_buffer("surface_HW", surface_HW, persistent=False)
    return module
