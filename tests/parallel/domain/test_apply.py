"""The whole model on bands of rows and columns: outputs, loss, gradients of inputs and of every parameter, against one process."""

import pytest
import torch
from torch import nn

from credit_like.models import wxformer
from credit_like.nn import init
from credit_like.parallel.domain.apply import apply_domain_parallel
from credit_like.parallel.domain.gradients import sync_domain_gradients
from credit_like.parallel.domain.layer import DOMAIN_LAYERS
from credit_like.parallel.domain.manager import get_domain_manager
from credit_like.parallel.domain.padding import DomainUnpad
from credit_like.parallel.domain.spatial import ChunkShare, gather_spatial, shard_spatial, unpad_shard_interp
from credit_like.parallel.runtime import Runtime
from credit_like.plan.meter import Meter
from credit_like.schema.trainer import Parallelism
from tests.largest import largest, worst


def _serial(tiny, changes, width):
    model, (x, target) = tiny.model(width=width, **changes), tiny.batch(2, width=width)
    x.requires_grad_()
    y = model(x)
    loss = tiny.loss(y, target)
    loss.backward()
    return y.detach(), loss.detach(), x.grad, {n: p.grad for n, p in model.named_parameters()}


def _sharded(rank, shape, tiny, changes, reference):
    runtime = Runtime.start(Parallelism(data="none", domain=shape[0] * shape[1]), torch.device("cpu"))
    y_ref, loss_ref, x_grad, grads = reference
    width = y_ref.shape[-1]
    model = apply_domain_parallel(tiny.model(width=width, **changes), runtime.submeshes["domain"], shape)
    manager = get_domain_manager(model)
    x, target = tiny.batch(2, width=width)
    mine = shard_spatial(x, manager).clone().requires_grad_()
    y = model(mine)
    loss = tiny.loss(y, target, manager.rows, manager.columns)
    (loss * runtime.gradient_scale).backward()
    sync_domain_gradients(model, manager)
    total = runtime.sum_over_data(loss)
    with Meter() as meter:
        whole = ChunkShare(manager, (tiny.height, width))
        written = whole.collect(y)
    assert (written is None) == (rank > 0)
    assert whole.alone
    assert whole.first == (rank == 0)
    chunks = ChunkShare(manager, (-(-tiny.height // shape[0]), -(-width // shape[1])))
    assert not chunks.alone
    with Meter() as between:
        share = chunks.collect(y)
    assert (share - y_ref[..., *chunks.part]).abs().max() <= 1e-12 * y_ref.abs().max()
    # the first chunks have all of the remainder, the first bands one more point each
    edge = max(y.nbytes // y.shape[-2] * (shape[0] - 1), y.nbytes // y.shape[-1] * (shape[1] - 1))
    assert sum(m.bytes for m in between.messages) <= edge
    if shape[1] == 1:  # one message of the band, and only to the writer: its size is not asked for
        sent = y.nbytes if rank else 0
        assert [(m.kind, m.bytes, times) for m, times in meter.messages.items()] == [("all-to-all", sent, 1)]
    error = {
        "output": (y - shard_spatial(y_ref, manager)).abs().max() / y_ref.abs().max(),
        "written": torch.zeros(()) if written is None else (written - y_ref).abs().max() / y_ref.abs().max(),
        "gathered": (gather_spatial(y, manager) - y_ref).abs().max() / y_ref.abs().max(),
        "loss": (total - loss_ref).abs() / loss_ref,
        "input": (mine.grad / runtime.gradient_scale - shard_spatial(x_grad, manager)).norm() / x_grad.norm(),
    }
    everything = torch.cat([g.flatten() for g in grads.values()]).norm()
    got = dict(model.named_parameters())
    assert list(got) == list(grads)
    worst_of_all = worst(((got[n].grad - g).norm() / max(g.norm(), 1e-4 * everything), n) for n, g in grads.items())
    flat = torch.stack([(got[n].grad - g).norm() for n, g in grads.items()]).norm() / everything
    return {k: float(v.detach()) for k, v in error.items()} | {"flat": float(flat), "worst": worst_of_all}, (
        manager.rows,
        manager.columns,
    )


TRANSPOSE = {"upsample": "transpose", "use_spectral_norm": False}
MIRROR = {"padding_conf": {"activate": True, "mode": "mirror", "pad_lat": (13, 14), "pad_lon": (4, 4)}, "dim_head": 4}
REPLICATE = {"padding_conf": {"activate": True, "mode": "replicate", "pad_lat": (0, 27), "pad_lon": (0, 8)}}
# 86 columns are padded to 97, of which the decoder makes 96: they are cropped to 85 and resized to 86.
ODD = {"padding_conf": {"activate": True, "mode": "earth", "pad_lat": (14, 14), "pad_lon": (5, 6)}}
EVERY_DAY = [((2, 1), {}, 24), ((3, 1), MIRROR, 24), ((2, 2), {}, 56)]
SLOW = [((4, 1), TRANSPOSE, 24), ((3, 1), REPLICATE, 24), ((2, 3), ODD, 86)]
LONG = [
    ((1, 2), {}, 56),
    ((1, 4), TRANSPOSE, 120),
    ((3, 2), MIRROR, 56),
    ((2, 2), REPLICATE, 56),
    ((2, 2), TRANSPOSE, 56),
]


@pytest.mark.parametrize(
    ("shape", "changes", "width"),
    [
        *EVERY_DAY,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
        *(pytest.param(*case, marks=pytest.mark.long) for case in LONG),
    ],
)
def test_parts_give_the_numbers_of_the_whole(run_ranks, tiny, shape, changes, width):
    reference = _serial(tiny, changes, width)
    results = run_ranks(shape[0] * shape[1], _sharded, shape, tiny, changes, reference)
    points = [
        (row, column)
        for _, (rows, columns) in results
        for row in range(*rows.indices(tiny.height))
        for column in range(*columns.indices(width))
    ]
    assert sorted(points) == [(row, column) for row in range(tiny.height) for column in range(width)]
    if shape[0] > 1:
        assert len({rows.stop - rows.start for _, (rows, _) in results}) > 1  # uneven
    for errors, _ in results:
        error, name = errors.pop("worst")
        assert largest(errors.values()) < 1e-12, errors
        assert error < 1e-10, name


def _spatial(rank, shape, tiny):
    ranks = shape[0] * shape[1]
    runtime = Runtime.start(Parallelism(data="none", domain=ranks), torch.device("cpu"))
    manager = get_domain_manager(apply_domain_parallel(tiny.model(width=56), runtime.submeshes["domain"], shape))
    errors = []
    for decoded, pads, (height, width) in [
        (128, {"pad_lat": (14, 14), "pad_lon": [4, 4]}, (101, 24)),
        (129, {"pad_lat": (14, 14), "pad_lon": [4, 4]}, (101, 24)),
        (101, {"activate": False, "pad_lat": (9, 9)}, (101, 32)),
        (60, None, (101, 24)),
    ]:
        torch.manual_seed(3)
        whole = torch.randn(1, 2, 1, decoded, 32, dtype=torch.float64, requires_grad=True)
        off = pads if pads and pads.get("activate", True) else {"pad_lat": (0, 0), "pad_lon": (0, 0)}
        (n, s), (w, e) = off["pad_lat"], off["pad_lon"]
        cut = whole[..., n : decoded - s, w : 32 - e].flatten(1, 2)
        expected = nn.functional.interpolate(cut, size=(height, width), mode="bilinear").unsqueeze(2)
        signal = torch.randn_like(expected)
        (expected * signal).sum().backward()
        mine = shard_spatial(whole.detach(), manager).clone().requires_grad_()
        y = unpad_shard_interp(mine, pads, manager, height, width)
        (y * shard_spatial(signal, manager)).sum().backward()
        errors.append((y - shard_spatial(expected, manager)).abs().max().detach())
        errors.append((mine.grad - shard_spatial(whole.grad, manager)).abs().max())
        again = mine.detach().clone().requires_grad_()
        (gather_spatial(again, manager, differentiable=True) * signal.sum()).sum().backward()
        errors.append((again.grad - ranks * signal.sum()).abs().max())
    return largest(errors)


@pytest.mark.parametrize("shape", [(3, 1), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_images_are_cut_resized_and_gathered(run_ranks, tiny, shape):
    assert max(run_ranks(shape[0] * shape[1], _spatial, shape, tiny)) < 1e-12


class _Mixes(nn.Module):
    in_channels = frames = 1
    height, width = 16, 8

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x):
        return self.layer(x.flatten(1, 2)).unsqueeze(1)


def _refused(rank):
    runtime = Runtime.start(Parallelism(data="none", domain=2), torch.device("cpu"))
    apply_domain_parallel(_Mixes(), runtime.submeshes["domain"])


def test_what_mixes_rows_outside_domain_layers_is_an_error_everywhere(launch_ranks):
    for answer in launch_ranks(2, _refused):
        assert answer[0] == "error"
        assert "layer (torch.nn.modules.conv.Conv2d) calls convolution" in answer[1]


def _too_many(rank, tiny):
    runtime = Runtime.start(Parallelism(data="none", domain=5), torch.device("cpu"))
    apply_domain_parallel(tiny.model(), runtime.submeshes["domain"])


def test_a_degree_without_rows_for_all_is_an_error_everywhere(launch_ranks, tiny):
    for answer in launch_ranks(5, _too_many, tiny):
        assert "rank rows, got 5: at 8 rows (windows of 2 rows) there are only 4 pieces" in answer[1]
        assert "degrees that work: 1, 2, 3, 4" in answer[1]


def _for_rows_only(rank, tiny):
    runtime = Runtime.start(Parallelism(data="none", domain=2), torch.device("cpu"))
    model = tiny.model(width=56)
    for kind in DOMAIN_LAYERS.values():
        kind.columns = kind is not DomainUnpad
    apply_domain_parallel(model, runtime.submeshes["domain"], (1, 2))


def test_a_layer_that_cannot_share_columns_is_an_error_everywhere(launch_ranks, tiny):
    for answer in launch_ranks(2, _for_rows_only, tiny):
        assert answer[0] == "error"
        assert "(Unpad)" in answer[1]
        assert "cannot share columns" in answer[1]


def _single_row(rank, build, x, expected):
    runtime = Runtime.start(Parallelism(data="none", domain=2), torch.device("cpu"))
    model = apply_domain_parallel(build(), runtime.submeshes["domain"], (1, 2))
    manager = get_domain_manager(model)
    error = model(shard_spatial(x, manager)).detach() - shard_spatial(expected, manager)
    return float(error.abs().max())


def test_columns_are_shared_where_the_coarsest_stage_has_one_row(run_ranks, tiny):
    changes = {
        "local_window_size": 1,
        "global_window_size": (2, 1, 2, 1),
        "padding_conf": {"activate": True, "mode": "replicate", "pad_lat": (2, 4), "pad_lon": (0, 4)},
    }

    def build():
        model = wxformer.build(tiny.config(**changes), in_channels=3, out_channels=2, frames=1, height=10, width=44)
        return init.initialise(model, 0).double()

    x = torch.randn(1, 3, 1, 10, 44, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = build()(x).detach()
    assert max(run_ranks(2, _single_row, build, x, expected)) < 1e-12
