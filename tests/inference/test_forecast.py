"""Forecast files: what is in them, and what is left of them when things go wrong."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import time
from pathlib import Path

import netCDF4
import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from world import make_context, make_experiment

from credit_like import lock as lock_module
from credit_like import outputs
from credit_like.data import times as calendar
from credit_like.errors import UserError, known_message
from credit_like.inference import forecast as forecasts
from credit_like.inference.forecast import write_forecasts
from credit_like.inference.paths import forecast_path
from credit_like.inference.writers import _base, _netcdf, _zarr
from credit_like.lock import Locked
from credit_like.rollout import rollout
from tests.experiments import contents

ENSEMBLE = {"members": 3, "amplitude": {"u": 0.5, "sp": 0.2}}


def write(data, save_loc, checkpoint="step-7", part=(0, 1), **inference):
    experiment = make_experiment(data, save_loc, **inference)
    outcome = write_forecasts(make_context(experiment), checkpoint, part=part)
    return experiment, outcome


def read(experiment):
    path = forecast_path(experiment)
    if path.suffix == ".zarr":
        return xr.open_zarr(path).load()
    files = [xr.load_dataset(file) for file in sorted(path.glob("*.nc"))]
    dims = "forecast_reference_time" if "forecast_reference_time" in files[0].dims else "time"
    return xr.concat(files, dims, data_vars="all", coords="different", compat="equals", join="exact")


@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
@pytest.mark.parametrize("flavour", ["weatherbench2", "cf"])
def test_files_hold_what_the_rollout_gave(data, tmp_path, kind, flavour):
    experiment, outcome = write(data, tmp_path, output={"type": kind, "flavour": flavour}, batch_size=2)
    assert outcome.finished
    assert outcome.computed == 3
    dataset = read(experiment)
    reference, period = dataset["u"].dims[:2]
    assert (reference == "time") == (flavour == "weatherbench2")
    context = make_context(experiment)
    stepper, store, variables = context.stepper, context.store, context.variables
    init = [store.index(f"2000-01-{day:02d}T00:00:00") for day in (9, 10, 11)]
    assert (
        dataset[reference].values.astype("datetime64[h]").tolist() == store.times[init].astype("datetime64[h]").tolist()
    )
    assert (dataset[period].values == np.arange(1, 5) * np.timedelta64(6, "h")).all()
    for batch in ([0, 1], [2]):
        for lead, state in rollout(stepper, store, variables, [init[i] for i in batch], 4):
            where = {reference: batch, period: lead - 1}
            np.testing.assert_array_equal(dataset["u"].isel(where).values, state.now[:, :2].numpy())
            np.testing.assert_array_equal(dataset["temperature"].isel(where).values, state.now[:, 2:4].numpy())
            np.testing.assert_array_equal(dataset["sp"].isel(where).values, state.now[:, 4].numpy())
            np.testing.assert_array_equal(dataset["rain"].isel(where).values, state.diagnostic[:, 0].numpy())
    if flavour == "cf":
        valid = dataset[reference].values[:, None] + dataset[period].values
        assert (dataset["time"].values == valid).all()
    assert dataset["u"].attrs["units"] == "m s-1"
    assert dataset["u"].attrs["standard_name"] == "eastward_wind"
    assert dataset["temperature"].attrs["standard_name"] == "air_temperature"
    assert dataset.attrs["checkpoint"] == "step-7"
    assert dataset.attrs["Conventions"] == "CF-1.11"


def test_both_formats_hold_the_same(data, tmp_path):
    first, _ = write(data, tmp_path / "a", output={"type": "zarr"}, ensemble=ENSEMBLE)
    second, _ = write(data, tmp_path / "b", output={"type": "netcdf"}, ensemble=ENSEMBLE)
    one, other = read(first), read(second)
    assert one["u"].dims == ("time", "number", "prediction_timedelta", "level", "latitude", "longitude")
    xr.testing.assert_identical(one, other.drop_encoding())
    # And through the other format again.
    one.to_netcdf(tmp_path / "again.nc")
    xr.testing.assert_identical(xr.load_dataset(tmp_path / "again.nc"), one)


def test_variables_levels_and_leads_are_selectable(data, tmp_path):
    output = {"type": "netcdf", "variables": ["rain", "u"], "levels": [850], "leads": ["12h", 4]}
    experiment, _ = write(data, tmp_path / "some", output=output)
    whole, _ = write(data, tmp_path / "all")
    some = read(experiment)
    assert set(some.data_vars) == {"rain", "u"}
    expected = read(whole)[["rain", "u"]].sel(level=[850], prediction_timedelta=some["prediction_timedelta"])
    xr.testing.assert_equal(some, expected)
    assert some["prediction_timedelta"].values.tolist() == [12 * 3600 * 10**9, 24 * 3600 * 10**9]


def test_derived_fields_on_the_levels_of_the_model_have_their_units(data, tmp_path):
    with xr.open_dataset(data) as dataset:
        dataset = dataset.load()
    dataset["v"] = dataset["u"] * 0.5
    dataset["v"].attrs = {"units": "m s-1"}
    dataset["level"].attrs = {"units": "mb"}
    dataset.to_netcdf(tmp_path / "wind.nc")
    experiment = make_experiment(
        tmp_path / "wind.nc", tmp_path / "run", derive=["wind_speed"], output={"type": "zarr", "variables": ["sp"]}
    )
    section = experiment.data.model_dump(mode="json", by_alias=True)
    section["prognostic"]["level"].append("v")
    experiment = experiment.model_copy(update={"data": type(experiment.data).model_validate(section)})
    write_forecasts(make_context(experiment), "step-7")
    levels = read(experiment)["wind_speed"]["level"]
    assert levels.values.tolist() == [500, 850]
    assert (levels.attrs["units"], levels.attrs["standard_name"]) == ("mb", "air_pressure")


def test_sums_over_another_time_than_the_step_say_so(data, tmp_path):
    with xr.open_dataset(data) as dataset:
        dataset = dataset.load()
    dataset["rain"].attrs["cell_methods"] = "time: sum"
    dataset.resample(time="1h").nearest().to_netcdf(tmp_path / "hourly.nc")
    experiment, _ = write(tmp_path / "hourly.nc", tmp_path / "run", init=["2000-01-09"], output={"type": "netcdf"})
    found = read(experiment)
    assert found["rain"].attrs["period_hours"] == "1"
    assert "period_hours" not in found["u"].attrs


def test_points_without_data_have_none(masked_data, tmp_path):
    experiment, _ = write(masked_data, tmp_path)
    for name, array in read(experiment).data_vars.items():
        assert np.isnan(array.values[..., :2, :3]).all(), name
        assert np.isfinite(array.values[..., 2:, :]).all(), name


@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
def test_a_forecast_that_overflows_is_written_with_a_warning(masked_data, tmp_path, caplog, kind):
    experiment = make_experiment(masked_data, tmp_path, ensemble=ENSEMBLE, batch_size=2, output={"type": kind})
    context, calls = make_context(experiment), []

    def overflow(_module, _inputs, y_BCTHW):
        """Make the second of the first two members infinite at its third lead, at one point of one channel."""
        calls.append(1)
        if len(calls) == 3:
            y_BCTHW = y_BCTHW.clone()
            y_BCTHW[1, 2, :, 5, 5] = torch.inf
        return y_BCTHW

    context.stepper.model.register_forward_hook(overflow)
    write_forecasts(context, "step-7")
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    init = calendar.to_text(read(experiment).isel(time=0)["time"].values)
    assert message == (
        f"the forecast from {init}, member 1, is not finite from a lead of 18 h on: temperature@500 "
        "(1 of 2 forecasts of this batch are not)"
    )


def test_points_without_data_are_no_overflow(masked_data, tmp_path, caplog):
    write(masked_data, tmp_path)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_small_chunks_hold_the_same(data, tmp_path):
    whole, _ = write(data, tmp_path / "a")
    split, _ = write(data, tmp_path / "b", output={"type": "zarr", "chunk_mib": 0.0005})
    xr.testing.assert_identical(read(whole), read(split))
    array = zarr.open_array(forecast_path(split) / "u", mode="r")
    assert array.chunks == (1, 1, 1, 8, 16)
    assert array.shards == (1, 1, 2, 8, 16)


def test_small_netcdf_chunks_hold_the_same(data, tmp_path):
    whole, _ = write(data, tmp_path / "a", output={"type": "netcdf", "compression": 1})
    split, _ = write(data, tmp_path / "b", output={"type": "netcdf", "chunk_mib": 0.0035})
    xr.testing.assert_identical(read(whole), read(split))
    with netCDF4.Dataset(next(forecast_path(split).iterdir())) as file:
        assert file["u"].chunking() == [1, 3, 2, 8, 16]
        assert file["rain"].chunking() == [1, 4, 8, 16]


def test_members_are_reproducible_and_the_first_is_the_control(data, tmp_path):
    single, _ = write(data, tmp_path / "a")
    ensemble, _ = write(data, tmp_path / "b", ensemble=ENSEMBLE)
    more, _ = write(data, tmp_path / "c", ensemble={**ENSEMBLE, "members": 5}, batch_size=4)
    one, some, many = read(single), read(ensemble), read(more)
    xr.testing.assert_allclose(some.sel(number=0, drop=True), one, rtol=1e-6)
    xr.testing.assert_allclose(many.sel(number=[0, 1, 2]), some, rtol=1e-6)
    assert float(np.abs(some["u"].sel(number=1) - some["u"].sel(number=2)).max()) > 0.1


def test_a_finished_rollout_is_not_repeated(data, tmp_path, monkeypatch):
    write(data, tmp_path)
    before = contents(tmp_path)
    monkeypatch.setattr(forecasts, "rollout", None)
    _, outcome = write(data, tmp_path)
    assert outcome.computed == 0
    assert outcome.finished
    assert contents(tmp_path) == before


def test_a_record_of_an_earlier_release_is_that_of_the_same_forecasts(data, tmp_path):
    write(data, tmp_path)
    record = tmp_path / "forecasts" / "forecast.json"
    there = json.loads(record.read_text())
    there["experiment"]["inference"]["batch_size"] = 7  # which was recorded
    del there["experiment"]["inference"]["weights"]  # as if it were a new key
    record.write_text(json.dumps(there))
    _, outcome = write(data, tmp_path)
    assert outcome.finished
    there["experiment"]["inference"]["weights"] = "raw"
    record.write_text(json.dumps(there))
    with pytest.raises(UserError, match=r"with another experiment\.inference\.weights, change"):
        write(data, tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_a_damaged_record_is_found_before_anything_is_computed(data, tmp_path, text):
    write(data, tmp_path)
    (tmp_path / "forecasts" / "forecast.json").write_text(text, encoding="latin-1")
    with pytest.raises(
        UserError, match=r"expected the record of forecasts, got .*forecast\.json.*; remove .*/forecasts"
    ):
        _base.check_folder(tmp_path / "forecasts")


@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
def test_another_batch_size_completes_what_was_begun(data, tmp_path, kind):
    output = {"type": kind}
    whole, _ = write(data, tmp_path / "whole", output=output, ensemble=ENSEMBLE, batch_size=3)
    _, outcome = write(data, tmp_path / "begun", part=(1, 3), output=output, ensemble=ENSEMBLE, batch_size=3)
    assert not outcome.finished
    begun, outcome = write(data, tmp_path / "begun", output=output, ensemble=ENSEMBLE, batch_size=2)
    assert outcome.finished
    xr.testing.assert_allclose(read(begun), read(whole), rtol=1e-5)


def test_a_rank_that_another_overtakes_while_it_finishes_is_finished_too(data, tmp_path, monkeypatch):
    experiment, _ = write(data, tmp_path)
    before, final = contents(tmp_path), forecast_path(experiment)
    partial = final.with_name("forecast.zarr.part")
    final.rename(partial)
    for name in ("sp", "u"):
        (partial / name / "killed.partial").touch()
    unlink = Path.unlink

    def overtaken(path, missing_ok=False):
        """What the first process leaves of the second's search."""
        if partial.exists():
            for leftover in list(partial.glob("*/*.partial")):
                unlink(leftover)
            partial.rename(final)
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", overtaken)
        assert write(data, tmp_path)[1].finished
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
def test_what_is_missing_is_computed_and_no_more(data, tmp_path, kind, monkeypatch):
    write(data, tmp_path / "whole", output={"type": kind})

    class Cut(Exception):
        pass

    def cut(*args, **kwargs):
        if args[3] == [36]:
            raise Cut
        return rollout(*args, **kwargs)

    monkeypatch.setattr(forecasts, "rollout", cut)
    with pytest.raises(Cut):
        write(data, tmp_path / "cut", output={"type": kind})
    final = forecast_path(make_experiment(data, tmp_path / "cut", output={"type": kind}))
    assert not final.exists() or not list(final.glob("*20000110*.nc"))
    started = []
    monkeypatch.setattr(forecasts, "rollout", lambda *a, **k: started.append(a[3]) or rollout(*a, **k))
    _, outcome = write(data, tmp_path / "cut", output={"type": kind})
    assert started == [[36], [40]]
    assert outcome.finished
    assert same(tmp_path / "cut", tmp_path / "whole", kind)


def same(one: Path, other: Path, kind: str) -> bool:
    """Bitwise: every file of the store; of netCDF, whose creation order may show, every number."""
    if kind == "zarr":
        a, b = (contents(folder / "forecasts") for folder in (one, other))
        a.pop("forecast.json"), b.pop("forecast.json")
        return a == b
    pairs = zip(sorted(one.rglob("*.nc")), sorted(other.rglob("*.nc")), strict=True)
    return all(xr.load_dataset(a).identical(xr.load_dataset(b)) for a, b in pairs)


def _in_child(data, save_loc, kind, part=(0, 1), in_step=lambda: None):
    """A process of its own that makes the forecasts, and calls `in_step` in each of their steps."""

    def work():
        gc.freeze()  # what was dropped before the fork is not closed here
        torch.set_num_threads(1)
        experiment = make_experiment(data, save_loc, output={"type": kind}, ensemble=ENSEMBLE, batch_size=2)
        context = make_context(experiment)
        context.stepper.model.register_forward_hook(lambda *_: in_step())
        write_forecasts(context, "step-7", part=part)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
def test_killed_ten_times_it_ends_with_the_same_bits(data, tmp_path, kind):
    whole = _in_child(data, tmp_path / "whole", kind)
    whole.join(900)
    assert whole.exitcode == 0
    chance, kills = random.Random(5), 0
    # Eighteen batches of steps of 10 ms: most kills fall into computing or writing, some into opening.
    for _ in range(40):
        process = _in_child(data, tmp_path / "killed", kind, in_step=lambda: time.sleep(0.01))
        if kills == 10:
            process.join(900)
            break
        process.join(chance.uniform(0.1, 0.9))
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            kills += 1
        else:
            assert process.exitcode == 0
            shutil.rmtree(tmp_path / "killed")
    assert kills == 10
    assert process.exitcode == 0
    assert same(tmp_path / "killed", tmp_path / "whole", kind)
    assert not list((tmp_path / "killed" / "forecasts" / "done").glob("*.part"))


@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
def test_two_ranks_write_what_one_does(data, tmp_path, kind):
    single = _in_child(data, tmp_path / "one", kind)
    ranks = [_in_child(data, tmp_path / "two", kind, (rank, 2), lambda: time.sleep(0.002)) for rank in range(2)]
    for process in (single, *ranks):
        process.join(900)
        assert process.exitcode == 0
    assert same(tmp_path / "one", tmp_path / "two", kind)


@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
def test_two_processes_do_not_write_the_same_forecasts(data, tmp_path, kind, monkeypatch):
    """The second is refused, unless its part of the forecasts is another one."""
    monkeypatch.setattr(forecasts, "_LOCK_PATIENCE", 0.0)
    experiment = make_experiment(data, tmp_path, output={"type": kind}, ensemble=ENSEMBLE, batch_size=2)
    write_forecasts(make_context(experiment), "step-7", part=(0, 3))
    context = multiprocessing.get_context("fork")
    begun, over = context.Event(), context.Event()

    def wait(*_):
        begun.set()
        over.wait(900)

    def hold():
        gc.freeze()
        torch.set_num_threads(1)
        held = make_context(experiment)
        held.stepper.model.register_forward_hook(wait)
        write_forecasts(held, "step-7", part=(1, 3))
        os._exit(0)

    other = context.Process(target=hold)
    other.start()
    assert begun.wait(900)
    before = contents(tmp_path)
    for part in ((1, 3), (0, 1)):
        with pytest.raises(Locked, match=r"is in use by another process \(the forecast from 2000-.*--share"):
            write_forecasts(make_context(experiment), "step-7", part=part)
    assert contents(tmp_path) == before
    assert not write_forecasts(make_context(experiment), "step-7", part=(2, 3)).finished
    over.set()
    other.join(900)
    assert other.exitcode == 0
    assert write_forecasts(make_context(experiment), "step-7").finished


@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
def test_what_a_predecessor_completes_while_it_is_waited_for_is_not_repeated(data, tmp_path, kind, monkeypatch):
    context = multiprocessing.get_context("fork")
    begun, waited_for = context.Event(), context.Event()

    def wait() -> None:
        begun.set()
        waited_for.wait(900)

    first = _in_child(data, tmp_path, kind, in_step=wait)
    experiment = make_experiment(data, tmp_path, output={"type": kind}, ensemble=ENSEMBLE, batch_size=2)
    assert begun.wait(900)

    def until_it_ends(seconds: float) -> None:
        waited_for.set()
        first.join(900)

    monkeypatch.setattr(lock_module.time, "sleep", until_it_ends)
    outcome = write_forecasts(make_context(experiment), "step-7")
    assert first.exitcode == 0
    assert waited_for.is_set()
    assert (outcome.computed, outcome.finished) == (0, True)


def test_a_folder_that_somebody_has_emptied_is_filled_again(data, tmp_path):
    write(data, tmp_path)
    for path in (tmp_path / "forecasts").glob("*"):  # as the shell's, which leaves out hidden names
        if not path.name.startswith("."):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert (tmp_path / "forecasts" / ".lock").exists()
    assert write(data, tmp_path)[1].finished


@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
@pytest.mark.parametrize("ensemble", [{"members": 1}, ENSEMBLE], ids=["one", "members"])
def test_what_counts_as_complete_is_on_the_disk(data, tmp_path, kind, ensemble, monkeypatch):
    """A mark of completion that outlives a power failure is of files that do too."""
    fsync, flushed, marked = os.fsync, set(), []

    def flush(descriptor):
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def mark(path):
        made = {p.stat().st_ino for p in (tmp_path / "forecasts").rglob("*") if p.is_file() and values.search(str(p))}
        if path.parent.name == "done":
            marked.append(made <= flushed)
        touch(path)

    # Chunks of the store; files that have their final names. The batches hold one initial time, and none is computed ahead.
    values = re.compile(r"/c/\d" if kind == "zarr" else r"\.nc$")
    touch = Path.touch
    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "touch", mark)
    monkeypatch.setattr(forecasts.Background, "submit", lambda self, action: action())
    write(data, tmp_path, output={"type": kind}, batch_size=1, ensemble=ensemble)
    assert marked
    assert all(marked)


@pytest.mark.parametrize("during", ["record", "store"])
def test_forecasts_that_are_removed_while_they_begin_are_one_message(data, tmp_path, monkeypatch, during):
    """`train --fresh --force` may remove them until they are locked."""
    owner, name = {"record": (os, "link"), "store": (_zarr, "_consolidate")}[during]
    begin = getattr(owner, name)

    def removed_first(*arguments):
        shutil.rmtree(tmp_path / "forecasts")
        return begin(*arguments)

    monkeypatch.setattr(owner, name, removed_first)
    with pytest.raises(Locked, match="were removed by another process, perhaps with their run; start again"):
        write(data, tmp_path)


def test_a_process_that_begins_late_leaves_what_others_have_completed(data, tmp_path, monkeypatch):
    """It has looked for the store before another one created it and wrote the first forecasts."""
    listdir, outcomes = os.listdir, []

    def listed_before_another_writes(folder):
        names = listdir(folder)
        if not outcomes and "forecast.json" in names:
            outcomes.append(None)
            outcomes[0] = write(data, tmp_path, part=(0, 2))[1]
        return names

    monkeypatch.setattr(_zarr.os, "listdir", listed_before_another_writes)
    assert write(data, tmp_path, part=(1, 2))[1].finished
    assert outcomes[0].computed == 2


@pytest.mark.parametrize("during", ["record", "store"])
def test_a_rank_of_another_host_may_have_the_same_number(data, tmp_path, monkeypatch, during):
    """In containers, the ranks of different hosts usually do; here one begins while another one has half begun."""
    owner, name = {"record": (os, "link"), "store": (_zarr, "_consolidate")}[during]
    begin, outcomes = getattr(owner, name), []

    def another_begins_first(*arguments):
        monkeypatch.setattr(owner, name, begin)
        with monkeypatch.context() as there:
            there.setattr(outputs, "_machine", lambda: 1)
            outcomes.append(write(data, tmp_path, part=(1, 2))[1])
        return begin(*arguments)

    monkeypatch.setattr(owner, name, another_begins_first)
    outcomes.append(write(data, tmp_path, part=(0, 2))[1])
    assert [outcome.computed for outcome in outcomes] == [1, 2]
    assert outcomes[-1].finished


def test_drafts_of_other_ranks_may_disappear_while_a_store_is_flushed(data, tmp_path, monkeypatch):
    """Ranks that share a field write their chunks of one folder, each under a name for the draft first."""
    walk, listed = os.walk, []

    def listed_just_before_the_rename(folder, *args, **kwargs):
        for here, below, files in walk(folder, *args, **kwargs):
            inside_chunks = re.search(r"/c/\d", here)
            listed.extend([here] if inside_chunks else [])
            yield here, below, [*(["1.0123456789abcdef.partial"] if inside_chunks else []), *files]

    monkeypatch.setattr(os, "walk", listed_just_before_the_rename)
    assert write(data, tmp_path, output={"type": "zarr"})[1].finished
    assert listed


@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
def test_a_failed_write_fails_the_run(data, tmp_path, kind, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    class Full:
        chunks = (1, 1, 12, 24)
        __setitem__ = full

    experiment = make_experiment(data, tmp_path, output={"type": kind})
    with monkeypatch.context() as patch:
        patch.setattr(forecasts, "_WAITING", 1)
        patch.setattr(_zarr.ZarrWriter, "_array", lambda self, name: Full())
        patch.setattr(_netcdf, "File", full)
        with pytest.raises(RuntimeError, match=r"writing the forecast failed: .*No space left"):
            write_forecasts(make_context(experiment), "step-7")
        assert not forecast_path(experiment).exists() or not list(forecast_path(experiment).glob("*.nc"))
        assert not list((tmp_path / "forecasts").glob("done/*"))
    assert write_forecasts(make_context(experiment), "step-7").finished


def test_a_netcdf_file_that_the_system_does_not_let_grow_is_one_message(data, tmp_path):
    experiment = make_experiment(data, tmp_path, output={"type": "netcdf"})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**13, before[1]))
    try:
        with pytest.raises(RuntimeError) as raised:
            write_forecasts(make_context(experiment), "step-7")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = known_message(raised.value)
    assert said is not None
    assert said.startswith(str(forecast_path(experiment)))
    assert "free some space on its disk, raise the limit of the size of files (ulimit -f)" in said


def test_the_folder_of_another_experiment_is_refused(data, tmp_path):
    write(data, tmp_path)
    before = contents(tmp_path)
    for change, named in (
        ({"checkpoint": "step-8"}, "checkpoint"),
        ({"lead": "12h"}, "experiment.inference.lead"),
        ({"amp": True}, "bfloat16"),
    ):
        with pytest.raises(ValueError, match=f"inference.output.path: .* got some made with another .*{named}"):
            write(data, tmp_path, **change)
    assert contents(tmp_path) == before
    assert json.loads((tmp_path / "forecasts" / "forecast.json").read_text())["checkpoint"] == "step-7"


@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
def test_a_lead_that_is_named_twice_is_written_once(data, tmp_path, kind):
    path, _ = write(data, tmp_path / "twice", lead="1d", output={"type": kind, "leads": ["12h", 2, 4]})
    once, _ = write(data, tmp_path / "once", lead="1d", output={"type": kind, "leads": [2, 4]})
    xr.testing.assert_identical(read(path).load(), read(once).load())


def test_a_folder_with_other_files_is_refused(data, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="with other files in it"):
        write(data, tmp_path, output={"type": "zarr", "path": str(tmp_path / "notes")})
    assert contents(tmp_path) == {"notes/thesis.tex": b""}


@pytest.mark.parametrize(
    ("inference", "message"),
    [
        ({"output": {"type": "zarr", "variables": ["temprature"]}}, "did you mean 'temperature'"),
        ({"output": {"type": "zarr", "levels": [300]}}, "expected some of 500, 850, got 300"),
        ({"output": {"type": "zarr", "leads": ["2d"]}}, "expected leads of at most 4 steps, got 8"),
        ({"ensemble": {"members": 2, "amplitude": {"rain": 1.0}}}, "expected prognostic variables"),
        ({"init": "2010-01-01"}, "inference.init"),
    ],
)
def test_what_cannot_be_done_writes_nothing(data, tmp_path, inference, message):
    with pytest.raises(ValueError, match=message):
        write(data, tmp_path, **inference)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
def test_times_of_other_calendars_come_back(tmp_path, kind):
    from world import make_data

    with xr.open_dataset(make_data(tmp_path / "standard.nc")) as dataset:
        times = xr.date_range(
            "2000-02-28", periods=dataset.sizes["time"], freq="6h", calendar="360_day", use_cftime=True
        )
        dataset.load().assign_coords(time=times).drop_encoding().to_netcdf(tmp_path / "calendar.nc")
    experiment = make_experiment(tmp_path / "calendar.nc", tmp_path / "run", output={"type": kind})
    periods = {"train": ["2000-02-28", "2000-03-01"], "valid": ["2000-03-02", "2000-03-03"]}
    data = {
        **experiment.data.model_dump(),
        **periods,
        "test": ["2000-02-29", "2000-03-05"],
        "source": experiment.data.source,
    }
    experiment = experiment.model_copy(update={"data": type(experiment.data).model_validate(data)})
    write_forecasts(make_context(experiment), "step-7")
    got = [str(time) for time in read(experiment)["time"].values]
    assert got[:2] == ["2000-02-29 00:00:00", "2000-02-30 00:00:00"]


@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
@pytest.mark.parametrize("year", [1500, 2300])
def test_times_before_and_after_those_of_nanoseconds_come_back(tmp_path, kind, year):
    """As nanoseconds in 64 bits, 2300 would be 1715; dates of 1500 are of the calendar before the reform, or proleptic."""
    from world import make_data

    with xr.open_dataset(make_data(tmp_path / "near.nc")) as dataset:
        times = np.datetime64(f"{year}-02-28", "s") + 6 * 3600 * np.arange(dataset.sizes["time"]).astype(
            "timedelta64[s]"
        )
        dataset.load().assign_coords(time=times).drop_encoding().to_netcdf(tmp_path / "far.nc")
    experiment = make_experiment(tmp_path / "far.nc", tmp_path / "run", output={"type": kind})
    periods = {
        "train": [f"{year}-02-28", f"{year}-03-01"], "valid": [f"{year}-03-02", f"{year}-03-03"],
        "test": [f"{year}-03-04", f"{year}-03-06"],
    }  # fmt: skip
    data = {**experiment.data.model_dump(), **periods, "source": experiment.data.source}
    experiment = experiment.model_copy(update={"data": type(experiment.data).model_validate(data)})
    write_forecasts(make_context(experiment), "step-7")
    path, coder = forecast_path(experiment), xr.coders.CFDatetimeCoder(time_unit="s")
    files = [path] if kind == "zarr" else sorted(path.glob("*.nc"))
    found = [time for file in files for time in xr.load_dataset(file, decode_times=coder)["time"].values]
    assert found[:2] == [np.datetime64(f"{year}-03-04"), np.datetime64(f"{year}-03-05")]


@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
def test_forecasts_that_somebody_removed_are_made_again(data, tmp_path, kind):
    """Their marks of completeness are still there."""
    experiment, _ = write(data, tmp_path, output={"type": kind})
    before = read(experiment)
    shutil.rmtree(forecast_path(experiment))
    experiment, outcome = write(data, tmp_path, output={"type": kind})
    assert outcome.computed == len(before["time"])
    xr.testing.assert_identical(read(experiment), before)


@pytest.mark.parametrize("lost", ["zarr.json", "time/c", "prediction_timedelta", "u", "u/zarr.json", "latitude/c/0"])
@pytest.mark.parametrize("finished", [True, False])
def test_a_store_that_lost_files_is_not_called_complete(data, tmp_path, lost, finished):
    """Of a finished one nothing is computed again, so that only its own files can tell."""
    write(data, tmp_path, part=(0, 1 if finished else 2))
    store = next((tmp_path / "forecasts").glob("forecast.zarr*"))
    path = store / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"forecast\.zarr.*; remove .*forecasts and run") as refused:
        write(data, tmp_path)
    assert len(str(refused.value).splitlines()) == 1
    assert contents(tmp_path) == before


@pytest.mark.parametrize("whole", [True, False])
def test_a_folder_that_is_removed_before_it_is_locked_is_not_filled(data, tmp_path, whole, monkeypatch):
    """As by `train --fresh --force`: the forecasts would be those of weights that are no more."""
    experiment = make_experiment(data, tmp_path)
    lock = forecasts.FileLock

    def removed(path, *args, **kwargs):
        shutil.rmtree(path.parent)
        if not whole:
            path.parent.mkdir()
        return lock(path, *args, **kwargs)

    monkeypatch.setattr(forecasts, "FileLock", removed)
    with pytest.raises(Locked, match="were removed by another process"):
        write_forecasts(make_context(experiment), "step-7")
    assert not (tmp_path / "forecasts" / "forecast.zarr").exists()


def test_a_store_that_is_removed_while_it_is_written_is_not_called_complete(data, tmp_path, monkeypatch):
    experiment = make_experiment(data, tmp_path)
    complete = _zarr.ZarrWriter.complete

    def removed(self, init):
        shutil.rmtree(self.partial, ignore_errors=True)
        (self.partial / "u").mkdir(parents=True)
        complete(self, init)

    monkeypatch.setattr(_zarr.ZarrWriter, "complete", removed)
    with pytest.raises(UserError, match=r"remove .*forecasts and run"):
        write_forecasts(make_context(experiment), "step-7")
    assert not forecast_path(experiment).exists()
