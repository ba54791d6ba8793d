"""The audit's figure has dates."""

import numpy as np
from matplotlib.image import imread

from credit_like.data.tools.audit import Audit


def test_the_lowest_panels_have_dates(tmp_path):
    times = [str(np.datetime64("2001-01-01") + day) + "T00:00:00" for day in range(40)]
    looks = np.random.default_rng(0).standard_normal((40, 5, 4))
    named = [(f"u {n} hPa", "m s**-1") for n in range(5)]
    looks[:, 4] *= 1e7
    audit = Audit([], [f"u@{n}" for n in range(5)], times, looks, np.zeros((40, 5)), named)
    titles = [ax.get_title(loc="left") for ax in audit.figure().axes[:5]]
    assert titles[0] == "u 0 hPa (m s⁻¹)"
    assert titles[4] == "u 4 hPa (10⁶ m s⁻¹)"
    axes = audit.figure().axes[:5]
    labels = [[label.get_text() for label in ax.get_xticklabels()] for ax in axes]
    assert labels[0] == []  # above another panel
    for found in labels[1:]:
        assert found == ["2001-01-01", "2001-01-11", "2001-01-21", "2001-01-30"]
    audit.plot(tmp_path / "audit.png")
    assert imread(tmp_path / "audit.png").shape[0] > 200
