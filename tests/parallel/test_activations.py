"""Bytes that a rank keeps for backward, counted on tensors without values with the operations of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode

from credit_like import ops
from credit_like.models import wxformer
from credit_like.parallel.domain.apply import apply_domain_parallel
from credit_like.parallel.domain.manager import get_domain_manager
from credit_like.parallel.environment import Environment
from credit_like.parallel.observe import fake_group
from credit_like.parallel.runtime import Runtime
from credit_like.plan.meter import attention_as_on_gpu
from credit_like.schema.trainer import Parallelism

MODEL = Path(__file__).parents[2] / "models" / "wxformer-0.25deg" / "model.yml"
HEIGHT, WIDTH, CHANNELS = 721, 1440, 76


def _kept(_rank: int, shape: tuple[int, int], place: int) -> int:
    """The bytes of all different storages that backward needs, without parameters."""
    config = yaml.safe_load(MODEL.read_text())["model"] | {"use_spectral_norm": False, "depth": [1, 1, 1, 1]}
    layout, part = Parallelism(data="none", domain=list(shape)), (HEIGHT, WIDTH)
    with fake_group(place, shape[0] * shape[1]), ops.cpu.policy.disabled(), attention_as_on_gpu():
        with torch.device("meta"):
            model = wxformer.build(
                wxformer.Config.model_validate(config),
                in_channels=CHANNELS,
                out_channels=CHANNELS,
                frames=1,
                height=HEIGHT,
                width=WIDTH,
            ).bfloat16()
            if max(shape) > 1:
                place = Environment(place, shape[0] * shape[1])
                runtime = Runtime.start(layout, torch.device("cpu"), environment=place)
                model = apply_domain_parallel(model, runtime.submeshes["domain"], shape)
                manager = get_domain_manager(model)
                part = tuple(len(range(*axis.own(axis.length))) for axis in manager.axes)
        with FakeTensorMode():
            for module in model.modules():
                for held in (module._parameters, module._buffers):
                    held.update({n: torch.empty(x.shape, dtype=x.dtype) for n, x in held.items() if x is not None})
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        module._parameters[name] = torch.nn.Parameter(parameter)
            own = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
            kept = {}

            def keep(x):
                storage = x.untyped_storage()
                if storage._cdata not in own:
                    kept[storage._cdata] = storage
                return x

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                y = model(torch.empty(1, CHANNELS, 1, *part, dtype=torch.bfloat16))
            assert y.shape[-2:] == part
            return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.slow
def test_eight_boxes_keep_an_eighth_each_and_a_tenth_of_that(run_ranks):
    whole, corner = (run_ranks(1, _kept, shape, 0)[0] for shape in ((1, 1), (4, 2)))
    assert whole > 6e9
    assert whole / 8 < corner < 1.1 * whole / 8
