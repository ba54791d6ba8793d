"""Units of a model in the code that the compiler generates, by its C++ backend: outputs and gradients are those of eager mode.

Other tests of compiled models trace them without generating code, which takes minutes.
"""

from __future__ import annotations

import importlib
import pkgutil
import shutil

import pytest
import torch

import credit_like.models
import credit_like.nn
from credit_like import ops
from credit_like.nn.layer import Layer, is_shard_unit
from credit_like.parallel.fsdp2 import shard_units
from tests.largest import largest
from tests.parallel.domain.test_noise import DECODER, KEYS, NORMS, with_noise

KINDS = [
    ("CrossEmbed", {}),
    ("TransformerLayer", {}),
    ("UpBlock", {}),
    ("UpHead", {}),
    ("Noise", {"noise": DECODER}),
    ("TransformerLayer", {"noise": NORMS}),
    ("UpBlock", {"upsample": "transpose"}),
]
CI = [("TransformerLayer", {}), ("UpBlock", {})]


def test_every_kind_of_unit_is_listed():
    for package in (credit_like.nn, credit_like.models):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    layers = [Layer]
    for layer in layers:
        layers += layer.__subclasses__()
    # Domain parallelism puts subclasses in their place.
    own = ("credit_like.nn.", "credit_like.models.")
    units = {layer.__name__ for layer in layers if layer.shard_unit and layer.__module__.startswith(own)}
    assert units == {name for name, _ in KINDS}


def _results(tiny, model, changes):
    x, target = tiny.batch(2)
    y = model(x, **({"key_B": KEYS} if "noise" in changes else {}))
    tiny.loss(y, target).backward()
    return [y.detach(), *(parameter.grad for parameter in model.parameters())]


def _error(_rank, tiny, name, changes):
    with ops.cpu.policy.disabled():  # the forms of operations that are compiled for GPUs
        expected = _results(tiny, with_noise(tiny.model(**changes)), changes)
        model = with_noise(tiny.model(**changes))
        unit = next(unit for unit in shard_units(model) if type(unit).__name__ == name)
        assert is_shard_unit(unit)
        unit.compile(fullgraph=True, dynamic=False)
        got = _results(tiny, model, changes)
    assert torch._dynamo.utils.counters["inductor"]
    return largest((a - b).norm() / max(float(b.norm()), 1e-6) for a, b in zip(got, expected, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(3600)  # minutes of a processor, and more on a busy machine
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by torch itself, when it looks for a backend
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, g++")
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param(*kind, marks=[] if kind in CI else pytest.mark.long, id="-".join([kind[0], *kind[1]]))
        for kind in KINDS
    ],
)
def test_the_code_of_a_unit_gives_the_numbers_of_eager_mode(run_ranks, tiny, name, changes, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    (error,) = run_ranks(1, _error, tiny, name, changes, timeout=3500)
    assert error < 1e-9
