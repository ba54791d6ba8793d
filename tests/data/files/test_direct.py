"""Fields that are decoded straight into a sample, from files that are joined, cut to a region, or neither."""

import numpy as np
import pytest

from credit_like.data.files.direct import direct
from credit_like.data.store import FieldStore, open_store
from credit_like.variables import Variables


@pytest.fixture(params=["zarr", "netcdf"])
def yearly(request, tmp_path, dataset):
    """The data in two files, a chunk a time: the template, and what is in them."""
    ds = dataset(steps=40, start="2001-12-27")
    for year, part in ds.groupby("time.year"):
        sizes = {name: (1, *v.shape[1:]) for name, v in part.items() if "time" in v.dims}
        path = tmp_path / f"y_{year}.{request.param}"
        if request.param == "zarr":
            part.to_zarr(path, encoding={name: {"chunks": s} for name, s in sizes.items()}, consolidated=False)
        else:
            part.to_netcdf(path, encoding={name: {"chunksizes": s, "zlib": True} for name, s in sizes.items()})
    return ds, {"type": request.param, "path": f"{tmp_path}/y_%Y.{request.param}"}


@pytest.mark.parametrize("region", [None, {"south": -45, "north": 70, "west": 60, "east": 240}])
def test_in_place_as_by_xarray(yearly, data_section, region, monkeypatch):
    ds, source = yearly
    data = data_section("", source={**source, "region": region}, levels=[500, 850, 1000])
    variables = Variables(data)
    store = open_store(data, variables)
    if region:
        ds = ds.sel(latitude=slice(70, -45), longitude=slice(60, 240))
    blocks = []
    plain = FieldStore._block
    monkeypatch.setattr(FieldStore, "_block", lambda *a: blocks.append(a) or plain(*a))
    times = [17, 18, 19, 20, 21, 3, 39]
    moving = [variable for variable in variables.outputs if not variable.spec.compute]
    for rows, columns in ((slice(None), slice(None)), (slice(1, 4), slice(None)), (slice(1, 4), slice(2, 5))):
        got = store.read(moving, times, rows, columns=columns)
        for variable, channels in Variables.slices(moving).items():
            field = ds[variable].isel(time=times, latitude=rows, longitude=columns)
            field = field.sel(level=[500, 850, 1000]) if "level" in field.dims else field.expand_dims("level", 1)
            np.testing.assert_array_equal(got[:, channels], field.values)
    assert not blocks, "some field went the long way"


def test_levels_that_do_not_follow_each_other_go_the_long_way(yearly, data_section):
    ds, source = yearly
    data = data_section("", source=source, levels=[1000, 100])
    variables = Variables(data)
    store = open_store(data, variables)
    got = store.read([variables["u"]], [19, 20])
    np.testing.assert_array_equal(got, ds["u"].isel(time=[19, 20]).sel(level=[1000, 100]).values)


def test_what_lies_between_is_seen(yearly, data_section):
    _, source = yearly
    variables = Variables(data_section("", source=source))
    dataset = open_store(data_section("", source=source), variables)._dataset(0)
    array, offsets = direct(dataset["u"].variable)
    assert offsets == [0, 0, 0, 0]
    assert array.chunks[0] == 1
    _, offsets = direct(dataset["u"].variable[3:, :, 2:4])
    assert offsets == [3, 0, 2, 0]
    assert direct(dataset["u"].variable[::2]) is None
    assert direct(dataset["u"].load().variable) is None
