"""The small world, created once per session."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    import world

    return world.make_data(tmp_path_factory.mktemp("data") / "world.nc")


@pytest.fixture(scope="session")
def masked_data(tmp_path_factory):
    import world

    return world.make_data(tmp_path_factory.mktemp("data") / "masked.nc", masked=True)
