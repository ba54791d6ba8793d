import csv
import os

import numpy as np
import pytest

from credit_like.data.statistics import Statistics, fit_statistics
from credit_like.data.store import open_store
from credit_like.data.tools import preprocess as module
from credit_like.data.tools.audit import robust_score
from credit_like.data.tools.preprocess import in_processes, load_scan, preprocess, save_scan, scan_piece


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr("credit_like.data.statistics._BLOCK_BYTES", 20_000)
    monkeypatch.setattr(module, "_PIECES", 5)
    monkeypatch.setattr(module, "_PIECE_TIMES", 8)


def same(a, b):
    for name in ("mean", "std", "change_std"):
        np.testing.assert_allclose(a.dataset[name], b.dataset[name], rtol=1e-12)
    for name in ("valid", "missing_position", "count"):
        np.testing.assert_array_equal(a.dataset[name], b.dataset[name])


def test_in_pieces_as_in_one(stored, dataset, tmp_path, small_pieces):
    ds = dataset()
    ds["t"][9] = np.nan
    ds["u"][..., 0, 0] = np.nan
    _, data, variables, store = stored(ds)
    seen = []
    statistics, _ = preprocess(store, variables, data, tmp_path / "out", lambda *x: seen.append(x))
    same(statistics, fit_statistics(store, variables, data))
    assert seen[-1] == (40, 40)
    assert len(seen) > 3
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["audit.csv", "audit.png", "statistics.nc"]
    same(Statistics.load(tmp_path / "out" / "statistics.nc", store), statistics)


def test_a_stopped_pass_goes_on_and_reads_nothing_twice(stored, tmp_path, small_pieces, monkeypatch):
    _, data, variables, store = stored()
    scanned = []

    def stop_after(pieces):
        def scan(piece):
            if len(scanned) == pieces:
                raise KeyboardInterrupt
            scanned.append(piece.times)
            return scan_piece(piece)

        return scan

    monkeypatch.setattr(module, "scan_piece", stop_after(2))
    with pytest.raises(KeyboardInterrupt):
        preprocess(store, variables, data, tmp_path / "out")
    monkeypatch.setattr(module, "scan_piece", stop_after(99))
    seen = []
    statistics, _ = preprocess(store, variables, data, tmp_path / "out", lambda *x: seen.append(x))
    assert sum(scanned) == 40
    assert seen[0] == (scanned[0] + scanned[1], 40)
    same(statistics, fit_statistics(store, variables, data))


@pytest.mark.parametrize("removed", ["mean.npy", "count.npy", "npz"])
def test_a_pass_killed_while_it_removes_its_pieces_is_repeated(stored, tmp_path, small_pieces, monkeypatch, removed):
    _, data, variables, store = stored()
    remove = module.shutil.rmtree

    def killed(folder, **options):
        next(folder.glob(f"*.{removed}")).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(
        module.shutil, "rmtree", lambda path, **options: (killed if "parts" in path.name else remove)(path, **options)
    )
    with pytest.raises(KeyboardInterrupt):
        preprocess(store, variables, data, tmp_path / "out", climatology_days=5)
    expected = {p: p.read_bytes() for p in (tmp_path / "out" / "climatology.zarr").rglob("*") if p.is_file()}
    assert expected
    monkeypatch.setattr(module.shutil, "rmtree", remove)
    preprocess(store, variables, data, tmp_path / "out", climatology_days=5)
    assert {p: p.read_bytes() for p in expected} == expected
    assert not (tmp_path / "out" / "preprocess-parts").exists()


def test_a_piece_that_is_written_twice_does_not_end_a_pass(stored, tmp_path, small_pieces, monkeypatch):
    """dask repeats the piece of a worker that it has given up, which may still write it when the pass is complete."""
    _, data, variables, store = stored()
    rmdir = os.rmdir

    def written_meanwhile(path, **options):
        if "preprocess-parts" in str(path):
            (tmp_path / "out" / "preprocess-parts" / "late.npz").touch()
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", written_meanwhile)
    statistics, _ = preprocess(store, variables, data, tmp_path / "out")
    same(statistics, fit_statistics(store, variables, data))


def test_pieces_of_other_data_are_not_taken(stored, tmp_path, small_pieces, data_section):
    from credit_like.variables import Variables

    _, data, variables, store = stored()
    pieces = list(module._pieces(store, variables, data, tmp_path))
    other = data_section(data.source[0].path, train=["2001-01-02", "2001-01-06T18"])
    shorter = list(module._pieces(store, Variables(other), other, tmp_path))
    assert not {p.file for p in pieces} & {p.file for p in shorter}


@pytest.mark.slow
def test_over_processes(stored, tmp_path, small_pieces):
    _, data, variables, store = stored()
    statistics, _ = preprocess(store, variables, data, tmp_path / "out", mapper=in_processes(2))
    same(statistics, fit_statistics(store, variables, data))


def test_a_scan_survives_its_file(stored, tmp_path, small_pieces):
    _, data, variables, store = stored()
    piece = next(module._pieces(store, variables, data, tmp_path))
    scan_piece(piece)
    found = load_scan(piece.file)
    with open(tmp_path / "again.npz", "wb") as file:
        save_scan(found, file)
    again = load_scan(tmp_path / "again.npz")
    np.testing.assert_array_equal(found.valid, again.valid)
    np.testing.assert_array_equal(found.value.squares, again.value.squares)
    assert found.looks.keys() == again.looks.keys()


def test_the_audit_finds_what_was_put_in(stored, dataset, tmp_path):
    ds = dataset(steps=60).isel(time=[t for t in range(60) if t not in (20, 21)])
    ds["t"] = ds["t"] - 273.15
    ds["t"].attrs["units"] = "K"
    ds["u"][12] = np.nan
    ds["rain"][30] = 3.0
    ds["sp"][31] = ds["sp"][30]
    ds["sst"][7, 3, 3] = 4000.0
    ds["rain"][..., 0, 0] = np.nan
    ds["rain"][33, 4, 4] = np.nan
    ds["sst"].attrs["valid_max"] = 1000.0
    ds["rain"].attrs["valid_range"] = [-1e9, 1e9]
    _, data, variables, store = stored(ds, test=["2001-01-09", "2001-01-15T18"])
    _, found = preprocess(store, variables, data, tmp_path / "out")
    by_kind = {(f.kind, f.channel): f for f in found.findings}
    assert by_kind["missing times", "all"].count == 2
    assert by_kind["missing fields", "u@500"].detail.startswith("2001-01-04T00:00:00")
    assert by_kind["missing points that are there at other times", "rain"].count == 1
    assert by_kind["constant fields", "rain"].count == 1
    assert by_kind["fields like the one before", "sp"].count == 1
    assert by_kind["outliers of the maximum", "sst"].detail.startswith("2001-01-02T18:00:00")
    assert by_kind["points that never have data", "rain"].detail == "0.93% of the grid's points"
    assert by_kind["points that never have data", "rain"].count == 1
    invalid = by_kind["values outside the valid range", "sst"]
    assert invalid.count == 1
    assert invalid.detail.startswith("2001-01-02T18:00:00; ")
    assert ("values outside the valid range", "rain") not in by_kind
    assert "median -2" in by_kind["suspicious units", "t"].detail
    quiet = {"u@850": {"missing fields"}, "sp": {"fields like the one before"}, "sun": set()}
    for channel, kinds in quiet.items():
        assert {f.kind for f in found.findings if f.channel == channel} == kinds
    with open(tmp_path / "out" / "audit.csv") as file:
        assert [tuple(row) for row in csv.reader(file)][1:] == found.rows()
    assert (tmp_path / "out" / "audit.png").stat().st_size > 10_000


def test_a_season_is_no_outlier_where_most_values_are_the_same():
    warm = np.where(np.arange(400) % 100 < 60, 301.0, 301.0 + np.sin(np.arange(400) / 100 * np.pi) ** 2)
    warm += 1e-3 * np.random.default_rng(0).standard_normal(400)
    assert robust_score(warm).max() < 10
    warm[7] = 320.0
    assert robust_score(warm)[7] > 10
    assert (robust_score(warm) > 10).sum() == 1


def test_clean_data_have_no_findings(stored, tmp_path):
    _, data, variables, store = stored()
    _, found = preprocess(store, variables, data, tmp_path / "out")
    assert found.findings == []


def rewritten(ds, path):
    """Write a store in place of another one, as a user who repairs it does."""
    encoding = {name: {"chunks": (1, *v.shape[1:])} for name, v in ds.items() if "time" in v.dims}
    ds.to_zarr(path, encoding=encoding, consolidated=False, mode="w")


def test_files_that_are_corrected_in_place_are_read_again(stored, dataset, tmp_path, small_pieces):
    """After the pass itself has refused them."""
    ds = dataset()
    ds["rain"][:] = 0.25
    _, data, variables, store = stored(ds)
    with pytest.raises(ValueError, match="got rain constant"):
        preprocess(store, variables, data, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["audit.csv", "audit.png"]
    rewritten(dataset(), tmp_path / "store.zarr")
    again = open_store(data, variables)
    statistics, _ = preprocess(again, variables, data, tmp_path / "out")
    same(statistics, fit_statistics(open_store(data, variables), variables, data))


@pytest.mark.parametrize("days", [0, 5])
def test_pieces_of_files_that_have_changed_since_are_not_taken(
    stored, dataset, tmp_path, small_pieces, monkeypatch, days
):
    _, data, variables, store = stored()
    scanned = []

    def stop(piece):
        if scanned:
            raise KeyboardInterrupt
        scanned.append(piece)
        return scan_piece(piece)

    monkeypatch.setattr(module, "scan_piece", stop)
    with pytest.raises(KeyboardInterrupt):
        preprocess(store, variables, data, tmp_path / "out", climatology_days=days)
    monkeypatch.setattr(module, "scan_piece", scan_piece)
    assert list((tmp_path / "out" / "preprocess-parts").glob("*.npz"))
    rewritten(dataset() + 1, tmp_path / "store.zarr")
    again = open_store(data, variables)
    statistics, _ = preprocess(again, variables, data, tmp_path / "out", climatology_days=days)
    same(statistics, fit_statistics(again, variables, data))
