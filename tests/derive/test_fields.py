"""The derived fields of an experiment: values, what they need, and what is refused."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr

from credit_like.check import checked_experiment
from credit_like.checkpoint.export import with_coefficients
from credit_like.data.store import open_store
from credit_like.derive import fields, vertical
from credit_like.derive.fields import Derivation, written_derivation
from credit_like.derive.horizontal import vorticity
from credit_like.derive.levels import read_levels
from credit_like.errors import UserError
from credit_like.schema.derive import Derive
from credit_like.schema.errors import ExperimentError
from credit_like.schema.experiment import Experiment
from credit_like.schema.load import dump_experiment
from credit_like.variables import Variables
from tests.derived import LEVELS, A, B, everything, make_experiment, make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


def opened(world, levels=()):
    """Return store, variables and the first fields by name."""
    experiment = make_experiment(world, world / "run", levels)
    variables = Variables(experiment.data)
    store = open_store(experiment.data, variables)
    values = torch.from_numpy(store.read(variables.outputs, [0, 7]))
    return store, variables, {name: values[:, at] for name, at in Variables.slices(variables.outputs).items()}


def derived(world, config, levels=(), names=None):
    store, variables, x = opened(world, levels)
    derivation = Derivation(Derive.model_validate(config), variables)
    return derivation, derivation(x, torch.from_numpy(derivation.ground(store)), store.grid, names), store, x


def test_fields_are_those_of_the_functions(world):
    derivation, result, store, x = derived(world, everything(world))
    assert list(result) == [variable.name for variable in derivation.outputs]
    x = {name: value.double() for name, value in x.items()}
    ground = torch.from_numpy(derivation.ground(store)).expand(2, -1, -1)
    surface, wanted = x["surface_pressure"][:, 0], [85_000.0, 25_000.0, 50_000.0]
    levels = read_levels(str(world / "levels.yml"))
    interfaces = vertical.interface_pressure(surface, levels.a, levels.b)
    pressure = vertical.level_pressure(interfaces)
    phi = vertical.geopotential(ground, x["temperature"], x["specific_humidity"], interfaces)
    warmth = vertical.surface_temperature(x["temperature"], pressure, phi, ground, surface)
    to_ground = torch.cat([pressure, surface[:, None]], 1)
    phi, t = (
        vertical.interpolate(torch.cat([field, end[:, None]], 1), to_ground, wanted)
        for field, end in ((phi, ground), (x["temperature"], warmth))
    )
    phi, t = vertical.extrapolate_below_ground(phi, t, wanted, warmth, ground, surface)
    q, u, v = (vertical.interpolate(x[name], pressure, wanted) for name in ("specific_humidity", "u", "v"))
    at = torch.tensor(wanted, dtype=torch.float64)[:, None, None]
    assert (at > surface[:, None]).any(), "some points should be below ground"
    expected = {
        "geopotential": phi,
        "temperature_pl": t,
        "u_pl": u,
        "wind_speed": (u**2 + v**2).sqrt(),
        "relative_humidity": vertical.relative_humidity(t, q, at),
        "vorticity": vorticity(u, v, store.grid),
        "mean_sea_level_pressure": vertical.mean_sea_level_pressure(warmth, ground, surface)[:, None],
        "total_column_water": vertical.column_water(x["specific_humidity"], interfaces.diff(dim=-3))[:, None],
    }
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value.float(), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("conventions", ["standard", "credit"])
def test_geopotential_and_temperature_reach_the_ground_without_a_jump(world, conventions):
    """By numpy, between the lowest level and the ground of one column; CREDIT keeps the values of the lowest level there."""
    store, variables, x = opened(world)
    surface = x["surface_pressure"][0, 0].double()
    row, column = np.unravel_index(int(surface.argmin()), surface.shape)
    p_s, levels = surface[row, column].item(), read_levels(str(world / "levels.yml"))
    interfaces = levels.a + levels.b * p_s
    pressure = (interfaces[1:] + interfaces[:-1]) / 2
    wanted = [pressure[-1] * 1.0001, (pressure[-1] + p_s) / 2, p_s * (1 - 1e-7), p_s * (1 + 1e-7)]
    config = {
        "pressure_levels": [p / 100 for p in wanted],
        "model_levels": str(world / "levels.yml"),
        "fields": ["geopotential"],
        "conventions": conventions,
    }
    derivation = Derivation(Derive.model_validate(config), variables)
    ground = torch.from_numpy(derivation.ground(store))
    result = derivation(x, ground, store.grid)
    phi, t = (result[name][0, :, row, column].double().numpy() for name in ("geopotential", "temperature_pl"))
    own = Derivation(Derive.model_validate({**config, "pressure_levels": []}), variables)(x, ground, store.grid)
    lowest = {"phi": own["geopotential"][0, -1, row, column].item(), "t": x["temperature"][0, -1, row, column].item()}
    assert wanted[0] < p_s
    if conventions == "credit":
        np.testing.assert_allclose(phi[:3], lowest["phi"], rtol=1e-6)
        np.testing.assert_allclose(t[:3], lowest["t"], rtol=1e-6)
        return
    phi_s = ground[row, column].item()
    at = np.log(wanted[:3])
    ends = np.log([pressure[-1], p_s])
    np.testing.assert_allclose(phi[:3], np.interp(at, ends, [lowest["phi"], phi_s]), atol=0.01)
    np.testing.assert_allclose(t[:3], np.interp(at, ends, [lowest["t"], t[3]]), atol=1e-3)
    np.testing.assert_allclose(phi[2:], phi_s, atol=0.1)
    assert lowest["phi"] - phi_s > 1000


def test_rows_at_a_time_change_nothing(world, monkeypatch):
    _, whole, *_ = derived(world, everything(world))
    monkeypatch.setattr(fields, "_BLOCK_BYTES", 1)
    _, pieces, *_ = derived(world, everything(world))
    for name, value in whole.items():
        torch.testing.assert_close(pieces[name], value, rtol=0, atol=0)


def test_a_field_alone_is_the_same_as_among_others(world):
    _, whole, *_ = derived(world, everything(world))
    store, variables, x = opened(world)
    derivation = Derivation(Derive.model_validate(everything(world)), variables)
    ground = torch.from_numpy(derivation.ground(store))
    for variable in derivation.outputs:
        needed = {one.name: x[one.name] for one in derivation.inputs(variable.name)}
        alone = derivation(needed, ground, store.grid, [variable.name])
        torch.testing.assert_close(alone[variable.name], whole[variable.name], rtol=0, atol=0)


def test_levels_may_be_listed_in_any_order(world):
    _, down, *_ = derived(world, everything(world))
    _, up, *_ = derived(world, everything(world), tuple(range(LEVELS, 0, -1)))
    for name, value in down.items():
        torch.testing.assert_close(up[name], value, rtol=0, atol=0)


def test_some_of_the_levels_give_nearly_the_same_geopotential(world):
    _, whole, *_ = derived(world, everything(world))
    _, some, *_ = derived(world, everything(world), (1, 3, 5, 7, 9, 11, 12))
    difference = (some["geopotential"] - whole["geopotential"]).abs()[:, [0, 2]]
    assert 0 < difference.max() < 9.8 * 15
    assert (some["mean_sea_level_pressure"] - whole["mean_sea_level_pressure"]).abs().max() < 50


def test_without_pressure_levels_fields_are_on_those_of_the_model(world):
    names = ["geopotential", "relative_humidity", "wind_speed"]
    some = (3, 9, 12)
    derivation, result, _, x = derived(world, {"fields": names, "model_levels": str(world / "levels.yml")}, some)
    assert [variable.levels for variable in derivation.outputs] == [some] * 3
    torch.testing.assert_close(result["wind_speed"], torch.hypot(x["u"], x["v"]))
    assert (result["geopotential"].diff(dim=1) < 0).all()
    assert (result["relative_humidity"] > 0).all()


@pytest.mark.parametrize("fields_of", ["wind_speed", "vorticity", "divergence", "relative_humidity"])
@pytest.mark.parametrize("hybrid", [True, False])
def test_what_needs_no_other_level_is_computed_on_a_single_one(world, fields_of, hybrid):
    config = {"fields": [fields_of], **({"model_levels": str(world / "levels.yml")} if hybrid else {})}
    _, several, *_ = derived(world, config, (3, 9, 12))
    derivation, single, *_ = derived(world, config, (9,))
    assert [variable.levels for variable in derivation.outputs] == [(9,)]
    torch.testing.assert_close(single[fields_of], several[fields_of][:, 1:2])
    with pytest.raises(UserError, match=r"^derive: expected \w+ on at least two levels, got 1; change data.levels"):
        Derivation(Derive.model_validate({**config, "pressure_levels": [9]}), derivation.variables)


@pytest.mark.parametrize("round_to", [10, 0])
@pytest.mark.parametrize("some", [range(1, 13), (6, 3, 9, 12)])
def test_levels_named_by_their_pressures_are_those_of_their_numbers(world, tmp_path, some, round_to):
    """As CAM's `lev`, which archives give in full or in whole hPa, and of which a model may have some."""
    pressure = (A + 1e5 * B) / 100
    named = np.round((pressure[1:] + pressure[:-1]) / 2, round_to)[[number - 1 for number in some]]
    experiment = make_experiment(world, tmp_path, levels=tuple(named.tolist()))
    derivation = Derivation(Derive.model_validate(everything(world)), Variables(experiment.data))
    assert derivation.positions(derivation.variables["temperature"]).tolist() == [number - 1 for number in some]


def test_levels_may_be_named_as_in_the_file_of_coefficients(world, tmp_path):
    named = np.arange(12) * 80.0 + 7  # whole numbers that are no pressures of the coefficients
    xr.Dataset({"hyai": ("ilev", A / 1e5), "hybi": ("ilev", B), "P0": 1e5, "lev": ("lev", named)}).to_netcdf(
        tmp_path / "cam.nc"
    )
    derive = {"derive": [{"model_levels": str(tmp_path / "cam.nc"), "pressure_levels": [500]}]}
    experiment = make_experiment(world, tmp_path, levels=(167.0, 87.0, 887.0), inference=derive).to_dict()
    for plain in (experiment, with_coefficients(experiment)):
        made = Experiment.model_validate(plain)
        derivation = written_derivation(made, Variables(made.data))
        assert derivation.positions(derivation.variables["temperature"]).tolist() == [2, 1, 11]
    experiment["data"]["levels"] = [500, 850]
    made = Experiment.model_validate(experiment)
    with pytest.raises(UserError, match="expected levels of temperature from 1 to 12, or their pressures"):
        written_derivation(made, Variables(made.data))


def test_an_export_has_the_coefficients_in_place_of_their_file(world, tmp_path):
    derive = {"derive": everything(world)}
    experiment = make_experiment(world, tmp_path, inference=derive, evaluation=derive).to_dict()
    exported = Experiment.model_validate_json(json.dumps(with_coefficients(experiment)))
    assert str(world) not in json.dumps(exported.to_dict()["inference"]) + json.dumps(exported.to_dict()["evaluation"])
    derivation = written_derivation(exported, Variables(exported.data))
    np.testing.assert_array_equal(derivation.hybrid.a, A)
    np.testing.assert_array_equal(derivation.hybrid.b, B)


def test_a_file_of_coefficients_that_is_not_there_stays_a_path_and_is_said(world, tmp_path):
    derive = {"derive": [{"model_levels": str(tmp_path / "none.nc")}, "geopotential"]}
    experiment = make_experiment(world, tmp_path, inference=derive)
    assert with_coefficients(experiment.to_dict()) == experiment.to_dict()
    with pytest.raises(UserError, match=r"none.nc', which is not there; change it, or .*--set inference.derive=null"):
        written_derivation(experiment, Variables(experiment.data))
    with pytest.raises(UserError, match="expected lists a and b, got a; give both"):
        Derivation(Derive(fields=("geopotential",), model_levels={"a": (0, 1, 2)}), Variables(experiment.data))


def test_gradients_reach_every_input(world):
    store, variables, x = opened(world)
    derivation = Derivation(Derive.model_validate(everything(world)), variables)
    x = {name: value.clone().requires_grad_() for name, value in x.items()}
    result = derivation(x, torch.from_numpy(derivation.ground(store)), store.grid)
    sum(value.double().square().mean() for value in result.values()).backward()
    for name, value in x.items():
        assert torch.isfinite(value.grad).all(), name
        assert value.grad.abs().max() > 0, name


def test_on_pressure_levels_water_is_weighted_by_layers_between_them(world):
    config = {"fields": ["total_column_water", "wind_speed"], "pressure_levels": [2.5]}
    derivation, result, _, x = derived(world, config, (2, 3, 6))
    q = x["specific_humidity"].double()
    expected = (q * torch.tensor([50.0, 200.0, 150.0])[:, None, None]).sum(1, keepdim=True) / 9.80665
    torch.testing.assert_close(result["total_column_water"], expected.float())
    share = np.log(2.5 / 2) / np.log(3 / 2)
    between = x["u"][:, :1] + (x["u"][:, 1:2] - x["u"][:, :1]) * share
    torch.testing.assert_close(result["u_pl"], between)
    assert "geopotential" not in result
    assert derivation.hybrid is None


def test_water_below_the_ground_is_not_counted(world):
    """By numpy, with a ground between two levels; without surface pressure every layer counts whole."""
    store, variables, x = opened(world, (2, 3, 6))
    config = Derive(fields=("total_column_water",))
    plain = make_experiment(world, world / "run", (2, 3, 6)).to_dict()
    plain["data"]["prognostic"]["surface"] = []
    without = Variables(make_experiment(world, world / "run").model_validate(plain).data)
    q = x["specific_humidity"].double().numpy()
    rng = np.random.default_rng(0)
    x["surface_pressure"] = torch.from_numpy(rng.uniform(220, 700, x["surface_pressure"].shape))
    surface = x["surface_pressure"][:, 0].numpy()
    upper, lower = np.array([200.0, 250.0, 450.0]), np.array([250.0, 450.0, 600.0])
    for some, ends in ((variables, surface[:, None]), (without, np.inf)):
        thickness = np.clip(np.minimum(lower[:, None, None], ends) - upper[:, None, None], 0, None)
        derivation = Derivation(config, some)
        found = derivation({v.name: x[v.name] for v in derivation.inputs("total_column_water")}, None, store.grid)
        expected = (q * thickness).sum(1, keepdims=True) / 9.80665
        np.testing.assert_allclose(found["total_column_water"], expected, rtol=1e-6)


@pytest.mark.parametrize("fields_of", ["wind_speed", "vorticity", "divergence", "relative_humidity", None])
@pytest.mark.parametrize("pressure", [1.0, 6.5])
def test_pressures_beyond_the_levels_of_a_model_are_refused(world, fields_of, pressure):
    _, variables, _ = opened(world, (2, 3, 6))
    config = {"fields": [fields_of] if fields_of else [], "pressure_levels": [2, 6, pressure]}
    with pytest.raises(
        UserError,
        match=rf"^derive\.pressure_levels: expected .* of \w+, 2 to 6, got {pressure:g}; both are in hPa: change",
    ):
        Derivation(Derive.model_validate(config), variables)
    hybrid = {**config, "model_levels": str(world / "levels.yml"), "fields": ["geopotential"]}
    Derivation(Derive.model_validate(hybrid), variables)


@pytest.mark.parametrize(
    ("remove", "fields_of", "message"),
    [
        (
            "specific_humidity",
            ["geopotential"],
            "derive: expected temperature, specific_humidity, surface_pressure, geopotential_at_surface for geopotential, "
            "got an experiment without specific_humidity; add it",
        ),
        (
            "geopotential_at_surface",
            ["mean_sea_level_pressure"],
            "without geopotential_at_surface; add it to data (static)",
        ),
        ("v", ["vorticity"], "without v_component_of_wind"),
        ("surface_pressure", ["total_column_water"], "without surface_pressure"),
    ],
)
def test_what_is_missing_is_named(world, remove, fields_of, message):
    plain = make_experiment(world, world / "run").to_dict()
    for role in ("prognostic", "static"):
        for kind in ("level", "surface"):
            plain["data"][role][kind] = [v for v in plain["data"][role][kind] if v["name"] != remove]
    experiment = make_experiment(world, world / "run").model_validate(plain)
    config = Derive(fields=fields_of, model_levels=str(world / "levels.yml"))
    with pytest.raises(UserError) as refused:
        Derivation(config, Variables(experiment.data))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fields": ["geopotential"]}, "expected hybrid levels for geopotential, got levels of pressure"),
        ({"fields": ["wind_speed"], "model_levels": "era5-60"}, "derive.model_levels: expected era5-137 or a file"),
        ({}, "expected fields or pressure levels, got neither"),
    ],
)
def test_what_is_not_possible_is_refused(world, config, message):
    _, variables, _ = opened(world)
    with pytest.raises(UserError) as refused:
        Derivation(Derive.model_validate(config), variables)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "fields_of", "pressure_levels", "message"),
    [
        ("v", "wind_speed", [], "expected v on the levels of u (2, 3, 6) for wind_speed, got it on 2, 3, 7"),
        ("v", "vorticity", [], "expected v on the levels of u (2, 3, 6) for vorticity, got it on 2, 3, 7"),
        ("u", "divergence", [], "expected v on the levels of u (2, 3, 7) for divergence, got it on 2, 3, 6"),
        (
            "specific_humidity",
            "relative_humidity",
            [],
            "expected specific_humidity on the levels of temperature (2, 3, 6)",
        ),
        (
            "cloud",
            "total_column_water",
            [],
            "expected cloud on the levels of specific_humidity (2, 3, 6) for total_column",
        ),
        ("v", "wind_speed", [2.5], None),
        ("specific_humidity", "relative_humidity", [2.5], None),
    ],
)
def test_fields_of_one_level_after_the_other_need_variables_on_the_same(
    world, name, fields_of, pressure_levels, message
):
    plain = make_experiment(world, world / "run", (2, 3, 6)).to_dict()
    plain["data"]["diagnostic"]["level"] = [{"name": "specific_cloud_liquid_water_content"}]
    name = name.replace("cloud", "specific_cloud_liquid_water_content")
    for variable in plain["data"]["prognostic"]["level"] + plain["data"]["diagnostic"]["level"]:
        if variable["name"] == name:
            variable["levels"] = [2, 3, 7]
    variables = Variables(make_experiment(world, world / "run").model_validate(plain).data)
    config = Derive(fields=(fields_of,), pressure_levels=pressure_levels)
    if message is None:
        assert Derivation(config, variables).outputs[-1].levels == (2.5,)
        return
    with pytest.raises(UserError) as refused:
        Derivation(config, variables)
    assert message.replace("cloud", "specific_cloud_liquid_water_content") in str(refused.value)


@pytest.mark.parametrize("name", ["surface_pressure", "geopotential_at_surface"])
def test_what_is_at_the_surface_is_not_taken_from_levels(world, name):
    plain = make_experiment(world, world / "run").to_dict()
    for role in ("prognostic", "static"):
        parts = plain["data"][role]
        parts["level"] += [spec for spec in parts["surface"] if spec["name"] == name]
        parts["surface"] = [spec for spec in parts["surface"] if spec["name"] != name]
    variables = Variables(make_experiment(world, world / "run").model_validate(plain).data)
    with pytest.raises(UserError, match=f"derive: expected {name} at the surface for geopotential, got it on levels"):
        Derivation(Derive(fields=("geopotential",), model_levels=str(world / "levels.yml")), variables)


PRESSURE, HYBRID = {"pressure_levels": [2.5]}, {"model_levels": "hybrid", "pressure_levels": [500]}


@pytest.mark.parametrize(
    ("config", "declared", "levels", "message"),
    [
        ({"fields": ["total_column_water", "relative_humidity", "vorticity"]}, {}, "hPa", None),
        ({"fields": ["geopotential"], **HYBRID}, {}, "1", None),
        ({"fields": ["wind_speed"]}, {"temperature": "degC", "specific_humidity": "g kg-1"}, "hPa", None),
        (PRESSURE, {"temperature": "degC", "u": "knots"}, "hPa", None),
        (HYBRID, {"temperature": "degC"}, "1", "expected temperature in 'K', got 'degC', give the variable `units: K`"),
        (HYBRID, {"surface_pressure": "hPa"}, "1", "expected surface_pressure in 'Pa', got 'hPa', give the variable"),
        ({"fields": ["wind_speed"]}, {"u": "knots"}, "hPa", "expected u in 'm s-1', got 'knots', give the variable"),
        (
            {"fields": ["total_column_water"]},
            {"surface_pressure": "hPa"},
            "hPa",
            "expected surface_pressure in 'Pa', got 'hPa', give the variable",
        ),
        (
            {"fields": ["relative_humidity"]},
            {"specific_humidity": "g kg-1"},
            "hPa",
            "expected specific_humidity in 'kg kg-1'",
        ),
        ({"fields": ["relative_humidity"]}, {"specific_humidity": "kg m-3"}, "hPa", "got 'kg m-3', change it"),
        ({"fields": ["wind_speed"]}, {}, "Pa", None),
        (
            {"fields": ["relative_humidity"]},
            {},
            "Pa",
            "expected levels of specific_humidity in hPa, got 'Pa'; convert those of the files",
        ),
    ],
)
def test_units_that_the_data_declare_are_those_that_fields_are_computed_from(world, config, declared, levels, message):
    store, variables, _ = opened(world)
    config = {**config, **({"model_levels": str(world / "levels.yml")} if "model_levels" in config else {})}
    derivation = Derivation(Derive.model_validate(config), variables)
    units = {variable.name: declared.get(variable.name, store.attrs(variable)["units"]) for variable in variables}
    declaring = SimpleNamespace(
        variables=variables,
        attrs=lambda v: {"units": units[v.name]},
        level_units=lambda _: levels,
        level_attrs=lambda _: {},
        step_seconds=21600,
    )
    if message is None:
        derivation.check_units(declaring)
        return
    with pytest.raises(UserError, match=f"^derive: .*{re.escape(message)}"):
        derivation.check_units(declaring)


def test_hybrid_levels_are_not_taken_for_pressures(world):
    """Such levels may be in hPa too, and without their coefficients nothing can be interpolated to a pressure."""
    store, variables, _ = opened(world)
    hybrid = "atmosphere_hybrid_sigma_pressure_coordinate"
    declaring = SimpleNamespace(
        variables=variables, attrs=store.attrs, level_units=lambda _: "hPa", level_attrs=lambda _: {"standard_name": hybrid},
        step_seconds=21600,
    )  # fmt: skip
    Derivation(Derive(fields=("wind_speed",)), variables).check_units(declaring)
    for config in (Derive(fields=("relative_humidity",)), Derive.model_validate(PRESSURE)):
        with pytest.raises(
            UserError, match=f"^derive.model_levels: expected the coefficients of the levels .* {hybrid}"
        ):
            Derivation(config, variables).check_units(declaring)


@pytest.mark.parametrize("section", ["inference", "evaluation"])
def test_check_compares_the_units_of_what_is_derived(world, tmp_path, section):
    data = xr.load_dataset(world / "data.nc")
    data["temperature"].attrs["units"] = "degC"
    data.to_netcdf(tmp_path / "data.nc")
    experiment = make_experiment(tmp_path, tmp_path / "run", **{section: {"derive": everything(world)}})
    (tmp_path / "x.yml").write_text(dump_experiment(experiment))
    with pytest.raises(ExperimentError, match=rf"{section}\.derive: expected temperature in 'K', got 'degC'"):
        checked_experiment(tmp_path / "x.yml", scoring=True)


def test_levels_that_the_coefficients_do_not_have_are_refused(world, tmp_path):
    make_world(tmp_path, (1, 2, 12))
    (tmp_path / "levels.yml").write_text("a: [0, 5000, 0]\nb: [0, 0.3, 1]\n")
    _, variables, _ = opened(tmp_path, (1, 2, 12))
    with pytest.raises(
        UserError, match="levels of temperature from 1 to 2, or their pressures from 175 to 675 hPa, got 1 to 12"
    ):
        Derivation(Derive(fields=("geopotential",), model_levels=str(tmp_path / "levels.yml")), variables)


def test_total_water_stands_in_for_humidity_except_in_relative_humidity(world):
    """As in CREDIT's data of CAM; the condensate that it contains is not counted again."""
    plain = make_experiment(world, world / "run").to_dict()
    cloud = {"name": "specific_cloud_ice_water_content", "var": "specific_humidity"}
    plain["data"]["prognostic"]["level"] = ["temperature", {"name": "Qtot", "var": "specific_humidity"}, cloud]
    experiment = make_experiment(world, world / "run").model_validate(plain)
    variables = Variables(experiment.data)
    store = open_store(experiment.data, variables)
    x = {
        name: torch.from_numpy(store.read(variables.outputs, [0])[:, at])
        for name, at in variables.slices(variables.outputs).items()
    }
    names = ("geopotential", "total_column_water")
    config = {"fields": names, "model_levels": str(world / "levels.yml")}
    derivation = Derivation(Derive.model_validate(config), variables)
    assert [one.name for one in derivation.inputs("total_column_water")] == ["Qtot", "surface_pressure"]
    derivation.check_units(store)
    got = derivation(x, torch.from_numpy(derivation.ground(store)), store.grid)
    _, expected, *_ = derived(world, config)
    for name in names:
        torch.testing.assert_close(got[name], expected[name][:1], rtol=0, atol=0)
    with pytest.raises(UserError, match="got an experiment without specific_humidity"):
        Derivation(Derive(fields=("relative_humidity",), model_levels=str(world / "levels.yml")), variables)


def test_a_potential_temperature_is_not_taken_for_temperature(world):
    plain = make_experiment(world, world / "run").to_dict()
    plain["data"]["prognostic"]["level"][0] = {"name": "T", "var": "temperature"}
    variables = Variables(make_experiment(world, world / "run").model_validate(plain).data)
    told = {"units": "K", "long_name": "perturbation potential temperature theta-t0"}
    declaring = SimpleNamespace(
        variables=variables, attrs=lambda v: told if v.name == "T" else {}, level_units=lambda _: "1", level_attrs=lambda _: {},
        step_seconds=21600,
    )  # fmt: skip
    derivation = Derivation(Derive(fields=("geopotential",), model_levels=str(world / "levels.yml")), variables)
    with pytest.raises(UserError, match="derive: expected temperature, got T, which is 'perturbation potential"):
        derivation.check_units(declaring)


@pytest.mark.parametrize(
    ("declared", "name", "factor"),
    [
        *((text, "geopotential_at_surface", 9.80665) for text in ("m", "metres", "meters", "meter", "gpm")),
        ("km", "geopotential_at_surface", 9806.65),
        *((text, "geopotential_at_surface", 1) for text in ("m2 s-2", "m**2 s**-2", "J kg-1", "", "unheard of")),
        ("", "orography", 9.80665),
        ("m^2/s^2", "orography", 1),
    ],
)
def test_the_ground_is_a_height_or_a_geopotential_by_its_units(world, declared, name, factor):
    plain = make_experiment(world, world / "run").to_dict()
    plain["data"]["static"]["surface"] = [{"name": name, "var": "geopotential_at_surface"}]
    experiment = make_experiment(world, world / "run").model_validate(plain)
    variables = Variables(experiment.data)
    store = open_store(experiment.data, variables)
    known = store.attrs
    store.attrs = lambda variable: {"units": declared} if variable.name == name else known(variable)
    derivation = Derivation(Derive(fields=("geopotential",), model_levels=str(world / "levels.yml")), variables)
    derivation.check_units(store)
    np.testing.assert_allclose(derivation.ground(store), factor * store.static()[0].astype(float), rtol=1e-12)
    store.attrs = lambda variable: {"units": "hPa"} if variable.name == name else known(variable)
    with pytest.raises(UserError, match=f"derive: expected {name} in 'm2 s-2' or 'm', got 'hPa', change it"):
        derivation.check_units(store)


@pytest.mark.parametrize("names", [("clwc", "ciwc", "crwc", "cswc"), ("CLDLIQ", "CLDICE"), ("clw", "cli")])
def test_column_water_has_condensate_under_its_short_names(world, names):
    plain = make_experiment(world, world / "run").to_dict()
    plain["data"]["prognostic"]["level"] += [{"name": name, "var": "specific_humidity"} for name in names]
    experiment = make_experiment(world, world / "run").model_validate(plain)
    variables = Variables(experiment.data)
    store = open_store(experiment.data, variables)
    fields_of = torch.from_numpy(store.read(variables.outputs, [0]))
    x = {name: fields_of[:, at] for name, at in variables.slices(variables.outputs).items()}
    derivation = Derivation(Derive(fields=("total_column_water",), model_levels=str(world / "levels.yml")), variables)
    assert {one.name for one in derivation.inputs("total_column_water")} == {
        "specific_humidity",
        "surface_pressure",
        *names,
    }
    levels = read_levels(str(world / "levels.yml"))
    surface = x["surface_pressure"].double()
    thickness = torch.from_numpy(np.diff(levels.a)[:, None, None] + np.diff(levels.b)[:, None, None] * surface.numpy())
    water = (1 + len(names)) * (x["specific_humidity"].double() * thickness).sum(1, keepdim=True) / 9.80665
    got = derivation(x, None, store.grid)["total_column_water"]
    torch.testing.assert_close(got, water.float())
