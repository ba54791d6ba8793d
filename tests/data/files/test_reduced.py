"""Reduced grids as regular ones: exact where the points are, linear between, missing beside missing points."""

import numpy as np

from credit_like.data.files.reduced import regular_rows

PER_ROW = np.array([4, 8, 12, 8])
LONGITUDE = np.concatenate([5 + np.arange(n) * 360.0 / n for n in PER_ROW])


def test_points_stay_and_waves_are_interpolated():
    longitudes, rows = regular_rows(PER_ROW, LONGITUDE)
    np.testing.assert_allclose(longitudes, 5 + np.arange(12) * 30.0)
    got = rows(np.stack([np.arange(32.0), -np.arange(32.0)]))
    assert got.shape == (2, 4, 12)
    np.testing.assert_array_equal(got[1], -got[0])
    np.testing.assert_array_equal(got[0, 2], np.arange(12, 24))
    for row, (n, start) in enumerate(zip(PER_ROW, np.cumsum(PER_ROW) - PER_ROW, strict=True)):
        periodic = np.interp(longitudes - 5, np.arange(n + 1) * 360.0 / n, [*range(start, start + n), start])
        np.testing.assert_allclose(got[0, row], periodic)


def test_a_missing_point_spreads_to_its_neighbours_only():
    values = np.arange(32.0, dtype=np.float32)
    values[1] = np.nan
    got = regular_rows(PER_ROW, LONGITUDE)[1](values)
    assert got.dtype == np.float32
    assert np.flatnonzero(np.isnan(got[0])).tolist() == [1, 2, 3, 4, 5]
    assert not np.isnan(got[1:]).any()


def test_rows_of_a_part_of_the_globe_are_none():
    assert regular_rows(PER_ROW, LONGITUDE * 0.5) is None
    assert regular_rows(PER_ROW[:-1], LONGITUDE) is None
