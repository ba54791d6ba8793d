"""WXFormer against its plain transcription in fp64, its arithmetic checks, and its weights' independence of the layout."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from credit_like.models.wxformer import Config, build
from credit_like.nn import spectral_norm
from credit_like.nn.attention import PositionTables
from credit_like.nn.init import initialise
from credit_like.nn.layer import is_shard_unit

_SPEC = importlib.util.spec_from_file_location("wxformer_reference", Path(__file__).parent / "reference.py")
reference = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(reference)


def make(config, *, in_channels=3, out_channels=2, frames=1, height=32, width=64, seed=0):
    sizes = {"in_channels": in_channels, "out_channels": out_channels, "frames": frames}
    model = initialise(build(config, **sizes, height=height, width=width), seed).double()
    spectral_norm.refresh(model)
    return model


def gradients(output, cotangent, tensors):
    return torch.autograd.grad((output * cotangent).sum(), tensors, allow_unused=True)


def relative(a, b):
    return float(((a - b).norm() / b.norm()).detach())


def assert_same_function(model, config, x, tolerance=1e-9):
    """Output, input gradient and every parameter's gradient equal the reference's."""
    x = x.requires_grad_()
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    leaves = {name: state[name].requires_grad_() for name in parameters}
    expected = reference.wxformer(x, state, config)
    cotangent = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
    expected_gradients = gradients(expected, cotangent, [x, *leaves.values()])
    y = model(x)
    assert y.shape == expected.shape
    assert relative(y, expected) < tolerance
    got = gradients(y, cotangent, [x, *parameters.values()])
    scale = torch.cat([g.flatten() for g in expected_gradients[1:]]).norm()
    for name, a, b in zip(["x", *parameters], got, expected_gradients, strict=True):
        assert (a - b).norm() <= tolerance * max(b.norm(), 1e-3 * scale), name


@st.composite
def configurations(draw, sizes=(1, 2, 3), strides=(1, 2, 2, 2, 4)):
    """Grids that work: chosen at the coarsest stage and refined, so that windows divide every stage.

    `sizes` of windows and `strides` of the first stage decide how large the grids become.
    """
    windows = draw(st.tuples(*[st.sampled_from(sizes)] * 4))
    local = draw(st.sampled_from(sizes))
    lcm = torch.tensor([local, *windows]).unique().prod().item()
    coarse = (lcm * draw(st.integers(1, 2)), lcm * draw(st.integers(1, 2)))
    if coarse[0] * coarse[1] > 40:
        coarse = (lcm, lcm)
    stride0 = draw(st.sampled_from(strides))
    padded = [8 * c * stride0 for c in coarse]
    pads = [(0, 0), (0, 0)]
    if draw(st.booleans()):
        pads = [(draw(st.integers(0, 3)), draw(st.integers(0, 3))), (draw(st.integers(0, 2)), draw(st.integers(0, 2)))]
    height, width = padded[0] - sum(pads[0]), padded[1] - sum(pads[1])
    mode = draw(st.sampled_from(["earth", "mirror", "replicate"]))
    if mode == "earth" and width % 2:
        pads[1] = (pads[1][0], pads[1][1] + 1)
        width -= 1
    kernels = draw(st.sampled_from([(4,), (4, 8), (4, 8, 16), (4, 8, 16, 32), (5, 7), (4, 9)]))
    config = Config(
        dim=(8, 16, 32, 64),
        dim_head=draw(st.sampled_from([4, 8])),
        depth=draw(st.tuples(st.integers(1, 2), *[st.just(1)] * 3)),
        cross_embed_kernel_sizes=(kernels, draw(st.sampled_from([(2, 4), (2,), (3, 4)])), (2, 4), (2, 4)),
        cross_embed_strides=(stride0, 2, 2, 2),
        global_window_size=windows,
        local_window_size=local,
        padding_conf={"activate": True, "mode": mode, "pad_lat": pads[0], "pad_lon": pads[1]},
        upsample=draw(st.sampled_from(["pixel_shuffle", "transpose"])),
        use_spectral_norm=draw(st.booleans()),
        position_index=draw(st.sampled_from(["exact", "credit"])),
    )
    return config, height, width


def assert_case(case, frames, batch):
    config, height, width = case
    model = make(config, frames=frames, height=height, width=width)
    x = torch.randn(batch, 3, frames, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert_same_function(model, config, x)


cases = settings(deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), derandomize=True)


@settings(cases, max_examples=3)
@given(configurations(sizes=(1, 2), strides=(1, 2)), st.integers(1, 2), st.integers(1, 2))
def test_the_model_equals_its_definition(case, frames, batch):
    assert_case(case, frames, batch)


@pytest.mark.slow
@pytest.mark.parametrize("examples", [5, pytest.param(25, marks=pytest.mark.long)])
def test_the_model_equals_its_definition_on_larger_grids(examples):
    settings(cases, max_examples=examples)(given(configurations(), st.integers(1, 2), st.integers(1, 2))(assert_case))()


def test_the_default_configuration_equals_its_definition():
    for upsample in ("pixel_shuffle", "transpose"):
        config = Config(upsample=upsample, use_spectral_norm=True)
        assert_same_function(make(config), config, torch.randn(1, 3, 1, 32, 64, dtype=torch.float64))


def test_weights_depend_on_seed_and_name_alone():
    sizes = {"in_channels": 3, "out_channels": 2, "frames": 1, "height": 32, "width": 64}
    whole = initialise(build(Config(use_spectral_norm=True), **sizes), 7)
    with torch.device("meta"):
        late = build(Config(use_spectral_norm=True), **sizes)
    assert all(p.is_meta for p in late.parameters())
    initialise(late.to_empty(device="cpu"), 7)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, late.state_dict()[name]), name
    for (name, a), (_, b) in zip(whole.named_buffers(), late.named_buffers(), strict=True):
        assert torch.equal(a, b), name
    deeper = initialise(build(Config(depth=(2, 1, 1, 1), use_spectral_norm=True), **sizes), 7)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, deeper.state_dict()[name]), name
    other = initialise(build(Config(), **sizes), 8)
    name = "stages.0.layers.0.short.qkv.weight"
    assert not torch.equal(whole.state_dict()[name], other.state_dict()[name])


def test_subpixel_convolutions_start_without_a_checkerboard():
    model = make(Config())
    y = model.up1.up(torch.randn(1, 2, 4, 64, dtype=torch.float64)).unflatten(-1, (-1, 4))
    assert torch.equal(y, y[..., :1].expand_as(y))


@pytest.mark.parametrize(
    ("change", "height", "width", "words"),
    [
        ({"local_window_size": 3}, 32, 64, ["stage 0", "16 points of latitude", "local_window_size 3", "sums to 16"]),
        (
            {"global_window_size": (4, 3, 2, 1)},
            32,
            64,
            ["stage 1", "8 points", "global_window_size[1] 3", "window is 2"],
        ),
        ({"dim": (8, 16, 36, 64)}, 32, 64, ["dim[2]", "multiple of dim_head 8", "got 36", "32"]),
        ({"dim": (16, 16, 32, 64)}, 32, 64, ["up-block 3", "8 channels", "dim[0] = 16 groups", "128"]),
        ({}, 33, 64, []),
        ({}, 36, 64, ["latitude", "sums to 28 (grid 64)"]),
        ({"interp": False}, 33, 64, ["interp", "32 x 64", "33 x 64"]),
        ({"cross_embed_strides": (2, 2, 4, 2)}, 32, 64, ["cross_embed_strides[2]", "expected 2"]),
        ({"cross_embed_kernel_sizes": ((4,), (1, 4), (2,), (2,))}, 32, 64, ["cross_embed_kernel_sizes[1]", "got 1"]),
        (
            {"padding_conf": {"activate": True, "pad_lat": (40, 8), "pad_lon": (0, 0)}},
            32,
            64,
            ["pad_lat", "at most 32 rows north", "got 40"],
        ),
    ],
)
def test_what_does_not_fit_is_said_with_what_would(change, height, width, words):
    config = Config(**change)
    problems = config.check(height, width)
    assert bool(problems) == bool(words)
    for word in words:
        assert any(word in problem for problem in problems), problems
    if words:
        with pytest.raises(ValueError, match="does not fit"):
            build(config, in_channels=3, out_channels=2, frames=1, height=height, width=width)


def test_of_many_windows_that_do_not_fit_the_first_is_shown():
    (problem,) = Config(local_window_size=3).check(48, 94)
    assert "stage 0: 47 points of longitude" in problem
    assert "more conditions on longitude do not hold; padding_conf.pad_lon that sums to" in problem


@pytest.mark.parametrize("mode", ["earth", "mirror", "replicate"])
@pytest.mark.parametrize(
    ("height", "width", "windows"), [(32, 64, (8, 4, 2, 1)), (61, 120, (8, 4, 2, 1)), (30, 60, (4, 4, 2, 1))]
)
def test_the_pads_that_the_messages_propose_work(height, width, windows, mode):
    config = Config(local_window_size=4, global_window_size=windows, padding_conf={"activate": True, "mode": mode})
    messages = config.check(height, width)
    proposed = {"pad_lat": (0, 0), "pad_lon": (0, 0)}
    for found in re.findall(r"such as padding_conf: (\{.*\})", "\n".join(messages)):
        proposed |= yaml.safe_load(found)
    assert messages
    padded = Config.model_validate({**config.model_dump(), "padding_conf": {"mode": mode, **proposed}})
    assert padded.check(height, width) == []


def test_published_grids_fit():
    quarter = Config(
        dim=(128, 256, 512, 1024),
        depth=(2, 2, 8, 2),
        dim_head=32,
        cross_embed_kernel_sizes=((4, 8, 16, 32), (2, 4), (2, 4), (2, 4)),
        global_window_size=(10, 5, 2, 1),
        local_window_size=10,
        padding_conf={"activate": True, "pad_lat": (40, 40), "pad_lon": (80, 80)},
    )
    assert quarter.check(721, 1440) == []
    assert quarter.stage_sizes(721, 1440) == [(400, 800), (200, 400), (100, 200), (50, 100)]


def test_evaluation_takes_sigma_from_the_present_weights():
    config = Config(use_spectral_norm=True)
    model = make(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.eval()
    x = torch.randn(1, 3, 1, 32, 64, dtype=torch.float64)
    assert relative(model(x), reference.wxformer(x, model.state_dict(), config)) < 1e-9


def test_gradients_with_spectral_norm_do_not_change_under_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    config = Config(use_spectral_norm=True)
    x = torch.randn(1, 3, 1, 32, 64, dtype=torch.float64)
    found = []
    for recompute in (False, True):
        model = make(config).train()
        spectral_norm.before_step(model)
        if recompute:
            for module in model.modules():
                if is_shard_unit(module):
                    inner = module.forward
                    module.forward = lambda *given, inner=inner, **more: checkpoint(
                        inner, *given, use_reentrant=False, **more
                    )
        (model(x) ** 2).mean().backward()
        spectral_norm.correct_gradients(model)
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_bfloat16_stays_near_fp32():
    config = Config(use_spectral_norm=True)
    model = make(config).float()
    x = torch.randn(1, 3, 1, 32, 64)
    exact = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model(x)
    assert 0 < relative(rough.float(), exact) < 0.05


@pytest.mark.parametrize("layers", ["of one stage", "of different windows"])
def test_position_tables_of_a_stage_are_those_of_its_layers(layers):
    long = [4, 4, 2, 1] if layers == "of one stage" else [8, 2, 4, 2]
    config = Config(use_spectral_norm=True, depth=[2, 1, 3, 1], global_window_size=long)
    x = torch.randn(1, 3, 1, 32, 64, dtype=torch.float64)
    found, calls = [], []
    for together in (False, True):
        model = make(config).train()
        spectral_norm.before_step(model)
        for module in model.modules():
            if isinstance(module, PositionTables):
                module.together = together
                module.register_forward_hook(lambda _module, biases, tables: calls.append((len(biases), tables)))
        y = model(x)
        (y**2).mean().backward()
        spectral_norm.correct_gradients(model)
        found.append([y.detach(), *(p.grad for p in model.parameters())])
    for alone, one in zip(*found, strict=True):
        torch.testing.assert_close(one, alone, rtol=0, atol=1e-14 * max(1, alone.abs().max().item()))
    assert [count for count, _ in calls] == 2 * [4, 2, 6, 2]
    assert all(table is None for _, tables in calls[:4] for table in tables)
    assert all(table is not None for table in calls[6][1])
