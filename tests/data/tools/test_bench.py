import multiprocessing

import pytest

from credit_like.data.loading.windows import Windows
from credit_like.data.tools import bench
from credit_like.data.tools.bench import bench_data
from credit_like.errors import UserError


@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
def test_a_report_of_what_was_measured(stored, tmp_path, data_section, kind):
    from credit_like.data.store import open_store
    from credit_like.variables import Variables

    ds, data, variables, store = stored()
    if kind == "netcdf":
        for year, part in (("2001", ds.isel(time=slice(0, 20))), ("2002", ds.isel(time=slice(20, None)))):
            part.to_netcdf(tmp_path / f"a_{year}.nc")
        data = data_section("", source={"type": "netcdf", "path": str(tmp_path / "a_%Y.nc")})
        variables = Variables(data)
        store = open_store(data, variables)
    windows = Windows(store, variables, data.train, history_len=1, forecast_len=1)
    report = bench_data(windows, batches=8, num_workers=1, repeats=1)
    sample = windows[0]
    assert report.sample_bytes == sum(4 * x.numel() for x in (sample.prognostic, sample.forcing, sample.target))
    assert sum(report.shares.values()) == pytest.approx(1)
    assert report.samples_per_second > 0
    assert 0 < report.share_of_limit < 100
    assert report.limited_by in report.shares
    assert all(name and value for name, value in report.rows())


def test_a_format_that_no_other_library_reads_is_one_message(tmp_path):
    from credit_like.data.store import open_store
    from credit_like.variables import Variables
    from tests.data.sources.test_anemoi import make, section

    make(tmp_path / "a.zarr")
    data = section(tmp_path / "a.zarr")
    variables = Variables(data)
    windows = Windows(open_store(data, variables), variables, data.train, history_len=1, forecast_len=1)
    with pytest.raises(UserError, match="expected zarr or netCDF files on a local disk to compare with, got none"):
        bench_data(windows, batches=8, num_workers=1, repeats=1)


def test_processes_open_their_files_before_the_clock_starts(monkeypatch):
    opened = multiprocessing.get_context("fork").Value("i", 0)

    class Tasks(bench._Tasks):
        def __init__(self):
            self.fails = False

        def read(self, chosen):
            if self.fails:
                raise ValueError("no such file")
            if self._open == {}:
                self._open = {("file", "variable"): None}
                with opened.get_lock():
                    opened.value += 1

    tasks, seen = Tasks(), []
    monkeypatch.setattr(bench.time, "perf_counter", lambda: seen.append(opened.value) or 0.0)
    assert bench._in_processes(tasks, range(5), 2) == (0.0, 7)
    assert seen[0] == 2
    tasks.fails = True
    with pytest.raises(RuntimeError, match="a reading process ended"):
        bench._in_processes(tasks, range(5), 2)
