"""What the guard accepts gives on bands of rows what it gives on the whole image; what mixes rows is refused by name."""

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_flatten

from credit_like import bands
from credit_like.models import persistence, wxformer
from credit_like.nn.conv import Conv2d
from credit_like.nn.feed_forward import FeedForward
from credit_like.nn.norms import GroupNorm
from credit_like.parallel.domain import verify as proof
from credit_like.parallel.domain.apply import verify

HEIGHT, WIDTH, CHANNELS = 16, 8, 4


class Part(nn.Module):
    """(B, H, W, C) to (B, H, W, C) by a function of this module, which has `layer` and `weight`, and the image."""

    def __init__(self, function, layer=None, weight=None):
        super().__init__()
        self.function, self.layer = function, layer
        self.weight = None if weight is None else nn.Parameter(torch.randn(weight))

    def forward(self, x):
        return self.function(self, x)


class Image(nn.Module):
    """Parts one after another, as a model of the image."""

    in_channels, frames, height, width = CHANNELS, 1, HEIGHT, WIDTH

    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        x = x.flatten(1, 2).permute(0, 2, 3, 1)
        for part in self.parts:
            x = part(x)
        return x.permute(0, 3, 1, 2).unsqueeze(2)


def first(x):
    return x.permute(0, 3, 1, 2)


def last(x):
    return x.permute(0, 2, 3, 1)


def image_layer(make):
    """A layer of (B, C, H, W)."""
    return lambda: Part(lambda self, x: last(self.layer(first(x))), make())


def point_layer(make):
    """A layer of (B, H, W, C)."""
    return lambda: Part(lambda self, x: self.layer(x), make())


def plain(function, weight=None):
    return lambda: Part(function, weight=weight)


def attend(x, tokens):
    """Attention among `tokens`, a function that makes (batch, tokens, C) of the image, with its own projections."""
    flat = tokens(x)
    return F.scaled_dot_product_attention(flat, flat * 0.5, flat + 1).reshape(x.shape)


def gap(self, x):
    return x * torch.sigmoid(self.layer(x.mean((1, 2))))[:, None, None]


def global_attention(self, x):
    q, k, v = self.layer(x.flatten(1, 2)).chunk(3, -1)
    return x + F.scaled_dot_product_attention(q, k, v).unflatten(1, x.shape[1:3])


def into_new(x):
    y = x.new_empty(x.shape)
    y[..., :2], y[..., 2:] = x[..., 2:], x[..., :2]
    return y


def zero_first_row(x):
    x = x.clone()
    x[:, 0] = 0
    return x


def with_marked_row(x):
    marks = x.new_zeros(x.shape)
    marks[:, 0] = 1
    return x + marks


def old_view(x):
    y = x.new_empty(x.shape)
    row = y[:, 3:4]
    y.copy_(x)
    return x + row


LOCAL = {
    "linear": point_layer(lambda: nn.Linear(4, 4)),
    "matmul": plain(lambda s, x: x @ s.weight, (4, 4)),
    "einsum": plain(lambda s, x: torch.einsum("bhwc,cd->bhwd", x, s.weight), (4, 4)),
    "linear of points": plain(lambda s, x: (x.reshape(-1, 4) @ s.weight).reshape(x.shape), (4, 4)),
    "over columns": plain(lambda s, x: s.weight @ x, (8, 8)),
    "layer norm of channels": point_layer(lambda: nn.LayerNorm(4)),
    "layer norm of columns": point_layer(lambda: nn.LayerNorm((8, 4))),
    "rms norm": point_layer(lambda: nn.RMSNorm(4)),
    "batch norm of evaluation": image_layer(lambda: nn.BatchNorm2d(4).eval()),
    "1 x 1": image_layer(lambda: nn.Conv2d(4, 4, 1)),
    "1 x 3": image_layer(lambda: nn.Conv2d(4, 4, (1, 3), padding=(0, 1))),
    "1 x 3 around": image_layer(lambda: nn.Conv2d(4, 4, (1, 3), padding=(0, 1), padding_mode="circular")),
    "mlp": point_layer(lambda: nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4), nn.Dropout(0.0))),
    "gate": plain(lambda s, x: F.glu(torch.cat([x, x.flip(-1)], -1))),
    "attention along columns": plain(lambda s, x: attend(x, lambda y: y)),
    "attention of rows as a batch": plain(lambda s, x: attend(x, lambda y: y.flatten(0, 1))),
    "multi-head attention": plain(lambda s, x: attend(x, lambda y: y.reshape(-1, 8, 4))),
    "spectrum of a row": plain(lambda s, x: torch.fft.irfft(torch.fft.rfft(x, dim=2) * 0.5, n=8, dim=2)),
    "columns around": plain(lambda s, x: x - x.roll(1, 2)),
    "difference of columns": plain(lambda s, x: torch.cat([x[:, :, 1:] - x[:, :, :-1], x[:, :, :1]], 2)),
    "padded columns": plain(lambda s, x: last(F.pad(first(x), (2, 2, 0, 0), mode="circular"))[:, :, 1:-3]),
    "softmax of channels": plain(lambda s, x: x.softmax(-1)),
    "mean of columns": plain(lambda s, x: x - x.mean(2, keepdim=True)),
    "variance of channels": plain(lambda s, x: x / (1 + x.var(-1, keepdim=True))),
    "greatest column": plain(lambda s, x: x + x.max(2).values[:, :, None]),
    "sorted channels": plain(lambda s, x: x.sort(-1).values),
    "sum along columns": plain(lambda s, x: x.cumsum(2)),
    "channel weights": plain(lambda s, x: x * s.weight, (4,)),
    "column weights": plain(lambda s, x: x * s.weight, (8, 1)),
    "chosen": plain(lambda s, x: torch.where(x > 0, x, 0.1 * x).clamp(-2, 2)),
    "stacked": plain(lambda s, x: torch.stack([x, x.tanh()], -1).sum(-1)),
    "split and joined": plain(lambda s, x: torch.cat(x.chunk(2, -1)[::-1], -1)),
    "zeros beside": plain(lambda s, x: torch.cat([x, x.new_zeros(x.shape)], -1)[..., 2:6]),
    "into a new tensor": plain(lambda s, x: into_new(x)),
    "windows of whole rows": plain(lambda s, x: x.unflatten(1, (-1, 4)).softmax(2).flatten(1, 2)),
    "one channel off": plain(lambda s, x: torch.cat([x[..., :1].zero_().add(1), x[..., 1:]], -1)),
}
# For each: the module and the operation that the message names.
MIXING = {
    "global attention": (lambda: Part(global_attention, nn.Linear(4, 12)), "bmm"),
    "squeeze and excitation": (lambda: Part(gap, nn.Linear(4, 4)), "mean"),
    "difference by slices": (plain(lambda s, x: F.pad(x[:, 1:] - x[:, :-1], (0, 0, 0, 0, 0, 1))), "slice"),
    "difference by cat": (plain(lambda s, x: x - torch.cat([x.narrow(1, 15, 1), x.narrow(1, 0, 15)], 1)), "slice"),
    "rows put at the end": (plain(lambda s, x: torch.cat([x, x], 1)[:, ::2]), "cat"),
    "rows padded around": (plain(lambda s, x: last(F.pad(first(x), (0, 0, 1, 1), mode="circular"))[:, 2:]), "copy"),
    "layer norm of the image": (image_layer(lambda: nn.LayerNorm((4, 16, 8))), "native_layer_norm"),
    "3 x 3": (image_layer(lambda: nn.Conv2d(4, 4, 3, padding=1)), "convolution"),
    "3 x 1": (image_layer(lambda: nn.Conv2d(4, 4, (3, 1), padding=(1, 0))), "convolution"),
    "transposed": (image_layer(lambda: nn.ConvTranspose2d(4, 4, 3, padding=1)), "convolution"),
    "batch norm": (image_layer(lambda: nn.BatchNorm2d(4)), "native_batch_norm"),
    "group norm": (image_layer(lambda: nn.GroupNorm(2, 4)), "native_group_norm"),
    "instance norm": (image_layer(lambda: nn.InstanceNorm2d(4)), "native_batch_norm"),
    "pooled": (image_layer(lambda: nn.AvgPool2d(3, 1, 1)), "avg_pool2d"),
    "greatest around": (image_layer(lambda: nn.MaxPool2d(3, 1, 1)), "max_pool2d_with_indices"),
    "resized": (
        image_layer(lambda: nn.Sequential(nn.UpsamplingBilinear2d(scale_factor=2), nn.AvgPool2d(2))),
        "upsample_bilinear2d",
    ),
    "rolled": (plain(lambda s, x: x.roll(1, 1)), "roll"),
    "rolled as a whole": (plain(lambda s, x: x.roll(1)), "roll"),
    "flipped": (plain(lambda s, x: x.flip(1)), "flip"),
    "softmax of rows": (plain(lambda s, x: x.softmax(1)), "_softmax"),
    "summed along rows": (plain(lambda s, x: x.cumsum(1)), "cumsum"),
    "mean of all": (plain(lambda s, x: x - x.mean()), "mean"),
    "norm of all": (plain(lambda s, x: x / x.norm()), "linalg_vector_norm"),
    "greatest row": (plain(lambda s, x: x - x.amax(1, keepdim=True)), "amax"),
    "spectrum of a column": (plain(lambda s, x: torch.fft.irfft(torch.fft.rfft(x, dim=1), n=16, dim=1)), "_fft_r2c"),
    "matrix of rows": (plain(lambda s, x: torch.einsum("bhwc,gh->bgwc", x, s.weight), (16, 16)), "bmm"),
    "rows as channels": (plain(lambda s, x: x.transpose(1, 3) @ s.weight.new_ones(16, 4), (1,)), "mm"),
    "embedding of rows": (plain(lambda s, x: x + s.weight, (16, 1, 1)), "add"),
    "matrix for each row": (plain(lambda s, x: s.weight @ x, (16, 8, 8)), "bmm"),
    "number of the row": (plain(lambda s, x: x * torch.arange(x.shape[1], device=x.device)[:, None, None]), "mul"),
    "divided by the height": (plain(lambda s, x: x / x.shape[1]), "div"),
    "height as a tensor": (plain(lambda s, x: x * torch.tensor(x.shape[1])), "lift_fresh"),
    "height as a new tensor": (plain(lambda s, x: x * x.new_full((), x.shape[1])), "new_full"),
    "height as a sum": (plain(lambda s, x: x * x.new_ones(x.shape[1]).sum()), "sum"),
    "height as a sum of repeats": (plain(lambda s, x: x * s.weight.expand(x.shape[1], 4).sum(0), (4,)), "sum"),
    "otherwise where low": (plain(lambda s, x: x * 2 if x.shape[1] > 8 else x), "mul"),
    "first row off": (plain(lambda s, x: zero_first_row(x)), "select"),
    "first row marked": (plain(lambda s, x: with_marked_row(x)), "add"),
    "view from before": (plain(lambda s, x: old_view(x)), "add"),
    "strides": (plain(lambda s, x: x.unflatten(1, (4, -1)).softmax(1).flatten(1, 2)), "_softmax"),
    "rows and columns exchanged": (
        plain(lambda s, x: x.reshape(x.shape[0], 8, -1, 4).softmax(2).reshape(x.shape)),
        "reshape",
    ),
    "gathered": (plain(lambda s, x: x.gather(1, x.argsort(-1) % x.shape[1])), "gather"),
    "triangle": (plain(lambda s, x: x.transpose(2, 3).transpose(1, 3).tril()), "tril"),
}
OPERATION = {
    "otherwise where low": "permute|mul",
    "rows and columns exchanged": "view|reshape|_unsafe_view|_softmax|fails",
}


def image():
    return torch.randn(2, CHANNELS, 1, HEIGHT, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def runs(model):
    """Whether the model works on the whole image at all."""
    try:
        with torch.no_grad():
            model(image().float())
    except (RuntimeError, IndexError, ValueError, UserWarning):  # a layer may only warn of a number of channels
        return False
    return True


def changes_numbers(model, axis=0):
    """Whether the model gives other numbers for two bands than for the image."""
    x = image()
    model = model.to(torch.float64)
    try:
        with torch.no_grad():
            whole = model(x.clone())
            bands = torch.cat([model(part.clone()) for part in x.chunk(2, 3 + axis)], 3 + axis)
    except (RuntimeError, IndexError):
        return True
    return bands.shape != whole.shape or not torch.allclose(whole, bands, rtol=1e-10, atol=1e-12)


def refusal(model, degree=2, axis=0):
    try:
        verify(model, degree, axis)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", LOCAL)
def test_what_works_on_each_row_alone_is_accepted(name):
    torch.manual_seed(0)
    model = Image(LOCAL[name]())
    assert not changes_numbers(model)
    assert refusal(model) == ""


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows_is_refused_by_name(name):
    torch.manual_seed(0)
    make, operation = MIXING[name]
    model = Image(nn.Identity(), make())
    assert changes_numbers(model)
    message = refusal(model)
    assert re.search(rf"parts\.1(\.layer(\.0)?)? \([\w.]+\) .*({OPERATION.get(name, operation)})", message), message


PARTS = st.lists(st.sampled_from([*LOCAL, *MIXING]), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(PARTS, st.integers(0, 100), st.sampled_from([0, 1]))
def test_nothing_is_accepted_that_changes_numbers(names, seed, axis):
    torch.manual_seed(seed)
    model = Image(*(LOCAL[name]() if name in LOCAL else MIXING[name][0]() for name in names))
    assume(runs(model))  # a part that needs a number of rows may follow one that changes it
    message = refusal(model, axis=axis)
    if axis == 0 and all(name in LOCAL for name in names):
        assert message == ""
    if message == "":
        assert not changes_numbers(model, axis)


def test_columns_are_proven_apart_from_rows():
    torch.manual_seed(0)
    for name in ("linear", "1 x 1", "softmax of channels", "channel weights", "gate"):
        assert refusal(Image(LOCAL[name]()), axis=1) == "", name
    for name in ("columns around", "1 x 3", "over columns", "spectrum of a row", "mean of columns"):
        message = refusal(Image(LOCAL[name]()), axis=1)
        assert re.search(r"parts\.0.* band of columns would not give", message), message
        assert "row" not in message.replace("narrow", "")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(list(LOCAL)), min_size=2, max_size=5))
def test_local_parts_are_local_together(names):
    assert refusal(Image(*(LOCAL[name]() for name in names))) == ""


def test_dropout_is_refused_while_it_is_on():
    assert "random numbers" in refusal(Image(point_layer(lambda: nn.Dropout(0.1))()))
    assert refusal(Image(point_layer(lambda: nn.Dropout(0.1))()).eval()) == ""
    assert refusal(Image(point_layer(lambda: nn.Dropout(0.0))())) == ""


def test_within_a_domain_layer_rows_may_mix():
    parts = [
        lambda: Conv2d(4, 4),
        lambda: FeedForward(4),
        lambda: GroupNorm(2, 4),
        LOCAL["1 x 3"],
        LOCAL["attention along columns"],
    ]
    for degree in range(2, 6):
        assert refusal(Image(*(make() for make in parts)), degree) == ""
    assert "parts.1 (" in refusal(Image(Conv2d(4, 4), MIXING["rolled"][0]()))


def test_a_domain_layer_gets_the_bands_that_it_expects():
    shuffle = LOCAL["linear"]  # the bands of an image before a shuffle are not those of its height
    message = refusal(Image(Conv2d(4, 4, subpixel=2), shuffle(), Conv2d(4, 4)))
    assert "parts.2 (credit_like.nn.conv.Conv2d) is a domain layer and expects" in message
    transposed = Part(lambda self, x: self.layer(x.transpose(1, 2)).transpose(1, 2), Conv2d(4, 4))
    assert "parts.0.layer (credit_like.nn.conv.Conv2d) is a domain layer and expects" in refusal(Image(transposed))


def test_a_domain_layer_used_at_two_sizes_or_a_result_of_another_size_is_refused():
    conv = Conv2d(4, 4)
    twice = Part(lambda self, x: self.layer(x) + self.layer(x[:, :, :4]).repeat(1, 1, 2, 1), conv)
    assert refusal(Image(twice)) == ""  # the number of columns may differ
    assert "returns (2, 4, 1, 16, 4)" in refusal(Image(plain(lambda s, x: x[:, :, :4])()))
    assert "without rows" in refusal(Image(plain(lambda s, x: s.weight + x.new_zeros(x.shape), (4,))()))


def test_bands_of_whole_windows_may_be_cut_into_windows():
    model = Image(LOCAL["windows of whole rows"]())
    assert refusal(model, 2) == ""
    assert refusal(model, 4) == ""
    assert "parts.0" in refusal(model, 3)  # bands of 6 and 5 rows


def test_a_layer_that_is_registered_twice_keeps_its_parameters():
    layer = LOCAL["linear"]()
    model = Image(layer, layer)
    parameters = dict(model.named_parameters())
    assert refusal(model) == ""
    assert all(value is parameters[name] for name, value in model.named_parameters())
    assert len(dict(model.named_parameters())) == len(parameters)


def test_values_cannot_be_read_in_the_trace():
    message = refusal(Image(plain(lambda s, x: x * (2 if s.weight.sum() > 0 else 1), (4,))()))
    assert re.search(r"parts\.0 \([\w.]+\) cannot be traced without values", message), message


def test_persistence_is_accepted():
    sizes = {"in_channels": 3, "out_channels": 2, "frames": 2, "height": 12, "width": 8}
    model = persistence.build(persistence.Config(), **sizes)
    assert refusal(model, 3) == ""
    assert "degrees that work: 1, 2" in refusal(model, 13)


EARTH = {"activate": True, "mode": "earth", "pad_lat": (8, 8), "pad_lon": (4, 4)}
SWEEP = [
    ((32, 64), {"local_window_size": 1, "global_window_size": (4, 2, 2, 2)}),
    ((32, 64), {"local_window_size": 2}),
    ((64, 64), {"local_window_size": 1, "global_window_size": (8, 4, 2, 1), "upsample": "transpose"}),
    ((64, 32), {"local_window_size": 1, "global_window_size": 1, "use_spectral_norm": True}),
    ((144, 48), {"local_window_size": 3, "global_window_size": (3, 3, 3, 1)}),
    ((48, 56), {"padding_conf": EARTH, "local_window_size": 2, "global_window_size": (4, 4, 2, 1)}),
    ((64, 64), {"cross_embed_strides": (4, 2, 2, 2), "local_window_size": 1, "global_window_size": (2, 2, 1, 1)}),
    (
        (49, 56),
        {"padding_conf": EARTH | {"pad_lat": (8, 7)}, "local_window_size": 1, "global_window_size": (4, 2, 2, 2)},
    ),
]


def test_results_that_are_not_computed_again_have_the_form_that_torch_computes(monkeypatch):
    """Every operation of a WXFormer and of all local parts, on the whole image and on bands, along both axes."""
    computed, forms = proof._result, []

    def compared(func, args, kwargs):
        again = len(proof._FORMS)
        result = computed(func, args, kwargs)
        changes = any(a.alias_info is not None for a in func._schema.arguments)
        expected = result if changes else func(*args, **kwargs)
        (some, structure), (others, like) = tree_flatten(result), tree_flatten(expected)
        assert structure == like
        for one, other in zip(some, others, strict=True):
            assert (one.shape, one.stride(), one.dtype, one.device) == (
                other.shape,
                other.stride(),
                other.dtype,
                other.device,
            )
        forms.append(len(proof._FORMS) == again and not changes)
        return result

    monkeypatch.setattr(proof, "_result", compared)
    monkeypatch.setattr(proof, "_FORMS", {})
    grid, options = SWEEP[2]
    config = wxformer.Config.model_validate({"interp": True, **options})
    with torch.device("meta"):
        model = wxformer.build(config, in_channels=3, out_channels=2, frames=1, height=grid[0], width=grid[1])
    for axis in (0, 1):
        verify(model, 2, axis)
    for name in LOCAL:
        verify(Image(*[LOCAL[name]()] * 2), 2)
    assert sum(forms) > 500


@pytest.mark.parametrize(("grid", "options"), SWEEP)
def test_the_check_before_a_run_accepts_the_degrees_that_training_accepts(grid, options):
    height, width = grid
    config = wxformer.Config.model_validate({"interp": True, **options})
    with torch.device("meta"):
        model = wxformer.build(config, in_channels=3, out_channels=2, frames=1, height=height, width=width)
    levels = verify(model, 1).levels
    for degree in range(1, height + 2):
        refused = bands.degree_problem(levels, degree)
        assert bool(refused) == bool(config.check_parallel(height, width, tensor=1, domain=degree)), refused
    of_columns = verify(model, 1, axis=1).levels
    for axis, proven in enumerate((levels, of_columns)):  # the bands that `check` shows are those of training
        shown = bands.merge(config.levels(height, width, axis))
        assert {size: shown[size].unit for size in proven} == {size: level.unit for size, level in proven.items()}
    for degree in range(1, width + 2):
        refused = bands.degree_problem(of_columns, degree, 1)
        assert [m for _, m in config.check_parallel(height, width, tensor=1, domain=1, columns=degree)] == [
            refused
        ] * bool(refused)
        assert "row" not in refused
    most = max(degree for degree in range(1, height) if not bands.degree_problem(levels, degree))
    assert refusal(model, most) == ""
    ((degree, problem),) = config.check_parallel(height, width, tensor=1, domain=most + 1)
    assert degree == "domain"
    assert problem == refusal(model, most + 1).split(": ", 1)[1]
