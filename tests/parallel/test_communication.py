"""What a training step sends, counted operation by operation in real ranks, against a derivation from the model's structure.

The derivation is that of docs/parallelism.md. It knows the architecture's numbers and the layout, and nothing of the code
that communicates: no plans, no meshes, no units found by walking the model. Every collective of the step is compared: its
kind, its ranks, its bytes and how often it occurs.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from credit_like import build
from credit_like.plan.meter import Meter
from credit_like.schema.load import load_experiment
from tests.experiments import DEMO, SHORT, representatives

FLOAT = 4
HEIGHT, WIDTH = 32, 64
IN, OUT = 9, 8  # channels: 7 prognostic and 2 static; 7 prognostic and 1 diagnostic
NORTH, SOUTH = 16, 17  # 65 padded rows: one is lost at the first stride and made up for by the resize at the end
WEST = EAST = 16
DIM, DEPTH, WINDOW, GROUPS = (4, 8, 16, 32), (1, 2, 1, 1), 2, 4
NOISE = 3
KERNELS, STRIDE, STRIDES_OF_LONG = ((4, 8, 16), (2, 4), (2, 4), (2, 4)), 2, (4, 4, 2, 1)

SETTINGS = [
    *SHORT,
    f"model={{type: wxformer, dim: {list(DIM)}, depth: {list(DEPTH)}, dim_head: 2, local_window_size: {WINDOW}, "
    f"global_window_size: {list(STRIDES_OF_LONG)}, cross_embed_kernel_sizes: {[list(k) for k in KERNELS]}, "
    f"padding_conf: {{activate: true, mode: earth, pad_lat: [{NORTH}, {SOUTH}], pad_lon: [{WEST}, {EAST}]}}}}",
    "trainer.device=cpu",
    "trainer.use_ema=true",
    "trainer.scheduler.warmup_steps=2",
]


@dataclass(frozen=True)
class Case:
    """A layout and what else of an experiment changes the communication."""

    dp: int
    tensor: int
    domain: int
    data: str = "fsdp2"
    replicate: int = 1
    batch: int = 1
    micro: int = 1
    leads: int = 1
    spectral: bool = True
    keep: bool = False
    """Parameters stay gathered between forward and backward."""
    optimizer: str = "adamw"
    ensemble: int = 1
    members: int = 1
    columns: int = 1
    """Ranks along the columns; `domain` is the number of all that share a grid."""
    loss: str = "crps"
    """Of several members; with one, `crps` stands for that of the demonstration."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.domain // self.columns, self.columns

    @property
    def world(self) -> int:
        return self.dp * self.ensemble * self.tensor * self.domain

    @property
    def forecasts(self) -> int:
        """What a rank computes at once: its members of the samples of a micro-batch."""
        return self.batch * self.members // self.ensemble

    def settings(self) -> list[str]:
        layout = f"data: {self.data}, tensor: {self.tensor}, domain: {list(self.shape)}, replicate: {self.replicate}"
        members = [f"model.noise={{channels: {NOISE}}}"] if self.members > 1 else []
        return [
            *members,
            *([f"loss={{type: {self.loss}}}"] if self.members > 1 or self.loss != "crps" else []),
            f"trainer.members={self.members}",
            f"trainer.parallelism={{{layout}, ensemble: {self.ensemble}}}",
            f"trainer.micro_batch_size={self.batch}",
            f"trainer.global_batch_size={self.batch * self.micro * self.dp}",
            f"trainer.fsdp2_reshard_after_forward={str(not self.keep).lower()}",
            f"trainer.optimizer={{type: {self.optimizer}, learning_rate: 0.001}}",
            f"model.use_spectral_norm={str(self.spectral).lower()}",
            f"data.forecast_len={self.leads}",
        ]

    def place(self, rank: int) -> tuple[int, int, int, int]:
        """(data, ensemble, tensor, domain) coordinate."""
        of_model, domain = divmod(rank, self.domain)
        of_members, tensor = divmod(of_model, self.tensor)
        return of_members // self.ensemble, of_members % self.ensemble, tensor, domain

    def group(self, rank: int, *same: int) -> tuple[int, ...]:
        """The ranks whose coordinates in the dimensions `same` are those of `rank`."""
        mine = self.place(rank)
        return tuple(r for r in range(self.world) if all(self.place(r)[i] == mine[i] for i in same))


# ---- the architecture ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """A parameter; `split`: the dimension that tensor ranks share; `normalised` by its spectral norm."""

    shape: tuple[int, ...]
    split: int | None = None
    normalised: bool = False


def vectors(*sizes: int) -> list[Weight]:
    return [Weight((n,)) for n in sizes]


def matrix(*shape: int, split: int | None = None) -> Weight:
    return Weight(shape, split, normalised=True)


def embedding(stage: int) -> list[Weight]:
    channels = DIM[stage - 1] if stage else IN
    kernels, weights, left = KERNELS[stage], [], DIM[stage]
    for i, kernel in enumerate(kernels):
        width = left if i == len(kernels) - 1 else DIM[stage] // 2 ** (i + 1)
        left -= width
        weights += [matrix(width, channels, kernel, kernel), *vectors(width)]
    return weights


def attention(dim: int, window: int) -> list[Weight]:
    weights = [*vectors(dim, dim), matrix(3 * dim, dim, split=0), matrix(dim, dim, split=1), *vectors(dim)]
    if window > 1:
        hidden = dim // 4
        for o, i in ((hidden, 2), (hidden, hidden), (hidden, hidden), (1, hidden)):
            weights += [matrix(o, i), *vectors(o)]
        weights += vectors(*[hidden] * 6)
    return weights


def feed_forward(dim: int) -> list[Weight]:
    wide = 4 * dim
    up, down = [matrix(wide, dim, split=0), Weight((wide,), split=0)], [matrix(dim, wide, split=1), *vectors(dim)]
    return [*vectors(dim, dim), *up, *down]


def convolution(channels: int, outputs: int) -> list[Weight]:
    return [matrix(outputs, channels, 3, 3), *vectors(outputs)]


DECODER = [(DIM[3], DIM[3] // 2), (DIM[3] // 2 + DIM[2], DIM[3] // 4), (DIM[3] // 4 + DIM[1], DIM[3] // 8)]
HEAD = (DIM[3] // 8 + DIM[0], OUT)


def units(noise: bool = False) -> list[list[Weight]]:
    """What is gathered at once: 4 cross-embeddings, every transformer layer, 3 blocks of the decoder, the head, and noise."""
    found = []
    for stage, dim in enumerate(DIM):
        found.append(embedding(stage))
        layer = attention(dim, WINDOW) + attention(dim, STRIDES_OF_LONG[stage]) + 2 * feed_forward(dim)
        found += [layer] * DEPTH[stage]
    for channels, outputs in DECODER:
        norms = vectors(*[outputs] * 4)
        found.append(convolution(channels, 4 * outputs) + 3 * convolution(outputs, outputs) + norms)
    found.append(convolution(HEAD[0], 4 * OUT) + convolution(OUT, OUT))
    return found + [[Weight((2 * channels, NOISE))] for channels, _ in (*DECODER, HEAD) if noise]


# ---- rows and columns --------------------------------------------------------------------------------------------------

PADDED, PADDED_WIDTH = HEIGHT + NORTH + SOUTH, WIDTH + WEST + EAST
STAGES = [PADDED // 2 ** (stage + 1) for stage in range(4)]  # 32, 16, 8, 4
COLUMNS = [PADDED_WIDTH // 2 ** (stage + 1) for stage in range(4)]  # 48, 24, 12, 6
# Bands are whole windows where there is attention, and whole pairs of rows after a pixel shuffle.
UNITS = {size: math.lcm(WINDOW, 2) for size in (*STAGES, *COLUMNS)} | {2 * COLUMNS[0]: 2}
"""Not the rows of the first doubled stage, 64 like the image's columns: two bands of them are whole pairs in any case."""

Lists = list[list[int | None]]
"""Rows (or columns) of each rank; None is one of zeros."""


def bands(height: int, parts: int) -> list[range]:
    """Contiguous bands of whole units; the first ones have one more where they do not come out even."""
    unit = UNITS.get(height, 1)
    counts = [height // unit // parts + (i < height // unit % parts) for i in range(parts)]
    starts = [unit * sum(counts[:i]) for i in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def lists(height: int, parts: int) -> Lists:
    return [list(band) for band in bands(height, parts)]


@dataclass(frozen=True)
class Exchange:
    """have, want: rows of each rank along `axis`; `row`: elements of one row of a sample; `constant`: of data, without gradient."""

    axis: int
    have: Lists
    want: Lists
    row: int
    constant: bool = False

    def gives(self, giver: int, taker: int) -> int:
        """Rows that travel: each wanted row once, however often it is used."""
        return 0 if giver == taker else len(set(self.want[taker]) & set(self.have[giver]))

    def sent(self, rank: int) -> int:
        return sum(self.gives(rank, other) for other in range(len(self.have)))

    def returned(self, rank: int) -> int:
        return sum(self.gives(other, rank) for other in range(len(self.have)))

    @property
    def needed(self) -> bool:
        return any(self.sent(rank) for rank in range(len(self.have)))


def window(rows: range, height: int, kernel: int, stride: int) -> list[int | None]:
    """Rows under a kernel that is centred as far as its size allows; those outside the image are zeros."""
    before = (kernel - stride) // 2
    first, last = rows[0] * stride - before, rows[-1] * stride - before + kernel
    return [row if 0 <= row < height else None for row in range(first, last)]


def mirrored(row: int) -> int:
    """The image row behind a padded one: over the pole and back down the other side."""
    row -= NORTH
    return -1 - row if row < 0 else 2 * HEIGHT - 1 - row if row >= HEIGHT else row


Along = tuple[Lists, Lists]
"""What each rank along an axis has and wants."""


def windows(size: int, size_out: int, kernel: int, stride: int, n: int) -> Along:
    return lists(size, n), [window(b, size, kernel, stride) for b in bands(size_out, n)]


def halo(size: int, n: int) -> Along:
    return windows(size, size, 3, 1, n)


def enlarging(size: int, n: int) -> Along:
    """The convolution before a pixel shuffle: to half the bands of the larger image."""
    halves = [range(b.start // 2, b.stop // 2) for b in bands(2 * size, n)]
    return lists(size, n), [window(b, size, 3, 1) for b in halves]


def cut(size: int, size_out: int, before: int, n: int) -> Along:
    return lists(size, n), [[at + before for at in band] for band in bands(size_out, n)]


def between(size: int, size_out: int, n: int) -> Along:
    """What bilinear interpolation reads, pixel centres aligned."""
    found = []
    for band in bands(size_out, n):
        places = [max((at + 0.5) * size / size_out - 0.5, 0.0) for at in band]
        found.append(list(range(math.floor(places[0]), min(math.floor(places[-1]) + 2, size))))
    return lists(size, n), found


def groups(size: int, strides: int, n: int) -> Lists:
    """What the ranks have while long attention computes: whole groups of equally spaced rows."""
    apart = size // strides
    shares = [len(range(i, apart, n)) for i in range(n)]  # the first ones have one more
    return [[a * apart + sum(shares[:i]) + y for a in range(strides) for y in range(shares[i])] for i in range(n)]


def exchanges(shape: tuple[int, int], place: tuple[int, int]) -> list[Exchange]:
    """All of one forward, in order: of rows, and then of columns of the rows that were fetched."""
    found: list[Exchange] = []

    def layer(rows: Along, columns: Along, channels: int, constant: bool = False) -> None:
        across = len(columns[0][place[1]]) * channels
        # Along an axis that is not shared, a layer itself adds what an exchange would.
        down = len(rows[shape[0] > 1][place[0]]) * channels
        found.extend([Exchange(0, *rows, across, constant), Exchange(1, *columns, down, constant)])

    def both(kind, sizes, *more, channels, constant=False):
        layer(*(kind(size, *more, n) for size, n in zip(sizes, shape, strict=True)), channels, constant)

    rows = [[mirrored(r) for r in b] for b in bands(PADDED, shape[0])]
    found.append(Exchange(0, lists(HEIGHT, shape[0]), rows, IN * len(bands(WIDTH, shape[1])[place[1]]), True))
    padded = bands(PADDED, shape[0])[place[0]]
    parts = [sum(r < NORTH for r in padded), sum(NORTH <= r < NORTH + HEIGHT for r in padded)]
    parts.append(len(padded) - sum(parts))
    for count, turn in zip(parts, (WIDTH // 2, 0, WIDTH // 2), strict=True):
        want = [[(c - WEST - turn) % WIDTH for c in b] for b in bands(PADDED_WIDTH, shape[1])]
        found += [Exchange(1, lists(WIDTH, shape[1]), want, IN * count, True)] * (count > 0)
    sizes, channels = (PADDED, PADDED_WIDTH), IN
    for stage, dim in enumerate(DIM):
        after = (STAGES[stage], COLUMNS[stage])
        layer(
            *(windows(a, b, max(KERNELS[stage]), STRIDE, n) for a, b, n in zip(sizes, after, shape, strict=True)),
            channels,
            constant=stage == 0,
        )
        sizes, channels, strides = after, dim, STRIDES_OF_LONG[stage]
        for _ in range(DEPTH[stage] if strides > 1 else 0):
            here = [lists(size, n) for size, n in zip(sizes, shape, strict=True)]
            there = [groups(size, strides, n) for size, n in zip(sizes, shape, strict=True)]
            layer((here[0], there[0]), (here[1], there[1]), dim)
            layer((there[0], here[0]), (there[1], here[1]), dim)
    for stage, (channels, outputs) in zip((3, 2, 1), DECODER, strict=True):
        sizes = (STAGES[stage], COLUMNS[stage])
        both(enlarging, sizes, channels=channels)
        for _ in range(3):
            both(halo, [2 * size for size in sizes], channels=outputs)
    both(enlarging, (STAGES[0], COLUMNS[0]), channels=HEAD[0])
    decoded = (2 * STAGES[0], 2 * COLUMNS[0])
    both(halo, decoded, channels=OUT)
    left = (decoded[0] - NORTH - SOUTH, decoded[1] - WEST - EAST)
    layer(cut(decoded[0], left[0], NORTH, shape[0]), cut(decoded[1], left[1], WEST, shape[1]), OUT)
    layer(between(left[0], HEIGHT, shape[0]), between(left[1], WIDTH, shape[1]), OUT)
    return [exchange for exchange in found if exchange.needed]


# ---- the step --------------------------------------------------------------------------------------------------------


def with_places(peers: tuple[int, ...], case: Case) -> list[tuple[int, tuple[int, int]]]:
    """The ranks that share a grid with their places in rows and columns."""
    return [(peer, divmod(case.place(peer)[-1], case.columns)) for peer in peers]


def derived(case: Case, rank: int) -> Counter:
    """(kind, ranks, bytes) → number of times in one optimiser step."""
    *_, part = case.place(rank)
    place = divmod(part, case.columns)
    world, tensor_peers, domain_peers = case.group(rank), case.group(rank, 0, 1, 3), case.group(rank, 0, 1, 2)
    along = [
        tuple(peer for peer, other in with_places(domain_peers, case) if other[1 - axis] == place[1 - axis])
        for axis in (0, 1)
    ]
    ensemble_peers, gradient_peers = case.group(rank, 0, 2, 3), case.group(rank, 2)
    every_unit = units(noise=case.members > 1)
    sums: Counter = Counter()
    forwards = case.micro * case.leads

    def add(kind: str, ranks: tuple[int, ...], size: int, times: int = 1) -> None:
        if len(ranks) > 1 and times:
            sums[kind, ranks, size] += times

    def held(weight: Weight) -> tuple[int, ...]:
        """What of a weight the tensor ranks leave to one."""
        return tuple(n // case.tensor if i == weight.split else n for i, n in enumerate(weight.shape))

    # Parameters and gradients.
    if case.data == "fsdp2":
        shards, copies = gradient_peers, ()
        if case.replicate > 1:
            per_copy = len(gradient_peers) // case.replicate
            at = gradient_peers.index(rank)
            shards = gradient_peers[at // per_copy * per_copy :][:per_copy]
            copies = gradient_peers[at % per_copy :: per_copy]
        for unit in every_unit:
            n = len(shards)
            padded = sum(-(-held(w)[0] // n) * n * math.prod(held(w)[1:]) for w in unit) * FLOAT
            add("all-gather", shards, padded, forwards * (1 if case.keep else 2))
            # Autograd adds up what the steps of a rollout give before anything is sent, and what earlier micro-batches left
            # is sent when the last one's rollout comes to its first use of a weight.
            times = 2 if case.micro > 1 and case.leads > 1 else 1
            add("reduce-scatter", shards, padded, times)
            add("all-reduce", copies, padded // n, times)
    elif case.tensor == 1:
        total = sum(math.prod(w.shape) for unit in every_unit for w in unit) * FLOAT
        assert total < 2**20, "more than one bucket"
        add("all-reduce", gradient_peers, total)

    # Tensor parallel: a sum after each row layer, forward; one where its input was copied, backward; the position biases.
    for stage, dim in enumerate(DIM):
        strides = STRIDES_OF_LONG[stage]
        points, long_points = 1, 1
        for size, n, at in zip((STAGES[stage], COLUMNS[stage]), case.shape, place, strict=True):
            points *= len(bands(size, n)[at])
            long_points *= len(groups(size, strides, n)[at]) if strides > 1 else len(bands(size, n)[at])
        layers = DEPTH[stage] * forwards
        for count, size in ((points, WINDOW), (long_points, strides)):
            image = case.forecasts * count * dim * FLOAT
            add("all-reduce", tensor_peers, image, 2 * layers)
            add("all-reduce", tensor_peers, size**4 * FLOAT, layers if size > 1 else 0)
        add("all-reduce", tensor_peers, case.forecasts * points * dim * FLOAT, 4 * layers)

    # The gradients of what tensor ranks hold alike, averaged over them in one message.
    if case.tensor > 1:
        at, n = (shards.index(rank), len(shards)) if case.data == "fsdp2" else (0, 1)
        alike = [w.shape for unit in every_unit for w in unit if w.split is None]
        rows_of = [range(shape[0])[at * -(-shape[0] // n) :][: -(-shape[0] // n)] for shape in alike]
        size = sum(len(rows) * math.prod(shape[1:]) for rows, shape in zip(rows_of, alike, strict=True)) * FLOAT
        add("all-reduce", tensor_peers, size)

    # Domain: the exchanges and their reverses, and the statistics of two group norms in each block of the decoder.
    if case.domain > 1:
        for exchange in exchanges(case.shape, place):
            size, at, peers = case.forecasts * exchange.row * FLOAT, place[exchange.axis], along[exchange.axis]
            add("all-to-all", peers, exchange.sent(at) * size, forwards)
            # what the data alone determine has no gradient: pads and the first embedding of the first lead
            backwards = forwards - case.micro if exchange.constant else forwards
            add("all-to-all", peers, exchange.returned(at) * size, backwards)
        add("all-gather", domain_peers, case.domain * 3 * case.forecasts * GROUPS * FLOAT, 6 * forwards)
        add("all-reduce", domain_peers, 2 * case.forecasts * GROUPS * FLOAT, 6 * forwards)

    # Scores of whole rows: the errors of this rank's members to the ranks with other columns, and their gradients back.
    rows, columns = (len(bands(size, n)[at]) for size, n, at in zip((HEIGHT, WIDTH), case.shape, place, strict=True))
    if case.loss in ("energy", "spectral-crps"):
        field = case.forecasts * OUT * rows * FLOAT
        add("all-to-all", along[1], field * columns * (case.columns - 1), forwards)
        add("all-to-all", along[1], field * (WIDTH - columns), forwards)
        columns = WIDTH

    # Ensemble: the predictions of this rank's members to every other rank, once for each, and nothing in backward.
    fields = case.forecasts * OUT * rows * columns
    add("all-to-all", ensemble_peers, fields * FLOAT, (case.ensemble - 1) * forwards)

    # Spectral norm: all layers of which no rank holds the whole matrix together.
    sharded = case.data == "fsdp2" and len(gradient_peers) > 1
    if case.spectral:
        normalised = [w for unit in every_unit for w in unit if w.normalised]
        split = [w for w in normalised if w.split is not None] if case.tensor > 1 else []
        pieces = normalised if sharded else split
        if pieces:
            add("all-reduce", world, sum(math.prod(w.shape[1:]) for w in pieces) * FLOAT)  # Wᵀu
            add("all-reduce", world, sum(w.shape[0] for w in pieces) * FLOAT)  # Wv
        if split:
            add("all-reduce", world, len(split) * FLOAT)  # <g, W>

    # Muon: each rank sends its part of every update to the matrix's owner, and an owner sends all of what it has made of one.
    if case.optimizer == "muon":
        assert case.tensor == case.domain == 1
        shapes = [w.shape for unit in every_unit for w in unit if len(w.shape) == 2 and min(w.shape) > 1]
        n, at = len(gradient_peers), gradient_peers.index(rank)
        work, owned = [0] * n, [0] * n
        for shape in sorted(shapes, key=lambda shape: -(min(shape) ** 2) * max(shape)):
            owner = work.index(min(work))
            work[owner] += min(shape) ** 2 * max(shape)
            owned[owner] += math.prod(shape)
        parts = [len(range(rows)[at * -(-rows // n) :][: -(-rows // n)]) * columns for rows, columns in shapes]
        add("all-to-all", world, sum(parts) * FLOAT)
        add("all-to-all", world, owned[at] * FLOAT)

    add("all-reduce", world, 8)  # the gradients' norm, in fp64
    if case.replicate == 1:
        add("all-reduce", gradient_peers, FLOAT)  # the loss
    else:
        add("all-reduce", shards, FLOAT)
        add("all-reduce", copies, FLOAT)
    add("all-reduce", world, 8)  # at the step's end: does any rank want to stop or to save?
    return sums


def _step(rank: int, save_loc: str, case: Case) -> Counter:
    experiment = load_experiment(DEMO, [*SETTINGS, *case.settings(), f"save_loc={save_loc}"])
    runtime = build.start(experiment)
    trainer = build.build_trainer(build.build_context(experiment, runtime))
    assert (trainer.state.model.in_channels, trainer.state.model.out_channels) == (IN, OUT)
    batches = trainer.train_loader.batches(0)
    samples = [next(batches) for _ in range(trainer.schedule.accumulation)]
    with Meter() as meter:
        trainer.train_step(iter(samples), trainer.schedule.accumulation, 1e-3, 1)
        runtime.agree(0)
    runtime.close()
    counted: Counter = Counter()
    for message, times in meter.messages.items():
        counted[message.kind, message.ranks, message.bytes] += times
    return counted


@pytest.fixture(scope="module")
def save_loc(tmp_path_factory):
    """A folder with the statistics, which every rank reads."""
    folder = tmp_path_factory.mktemp("communication")
    assert build.preprocess(load_experiment(DEMO, [*SETTINGS, f"save_loc={folder}"])) == 0
    return str(folder)


def test_the_derivation_knows_the_model(save_loc):
    experiment = load_experiment(DEMO, [*SETTINGS, "model.use_spectral_norm=true"])
    with torch.device("meta"):
        model = build.build_model(experiment, build.Variables(experiment.data), HEIGHT, WIDTH)
    shapes = Counter(tuple(p.shape) for p in model.parameters())
    assert shapes == Counter(w.shape for unit in units() for w in unit)
    normalised = Counter(tuple(m.weight.shape) for m in model.modules() if getattr(m, "spectral", None) is not None)
    assert normalised == Counter(w.shape for unit in units() for w in unit if w.normalised)


CASES = {
    "fsdp2": Case(2, 1, 1, batch=2),
    "tensor": Case(1, 2, 1, batch=2),
    "domain": Case(1, 1, 2, batch=2, spectral=False),
    "mix": Case(1, 2, 2),
    "ensemble": Case(1, 1, 1, batch=2, ensemble=2, members=4),
}
MORE = {
    "ddp": Case(2, 1, 1, data="ddp", micro=2, spectral=False),
    "domain-ddp": Case(1, 1, 2, data="none"),
    "kept": Case(2, 1, 1, keep=True),
    "rollout": Case(2, 1, 1, leads=3),
    "muon": Case(2, 1, 1, optimizer="muon"),
    "hybrid": Case(4, 1, 1, replicate=2),
    "mix": Case(1, 2, 2, leads=2, micro=2),
    "dp-tensor": Case(2, 2, 1, micro=2),
    "dp-domain": Case(2, 1, 2, batch=2),
    "all": Case(2, 2, 2, leads=2),
    "members": Case(2, 1, 1, members=2, batch=2),
    "ensemble": Case(1, 1, 1, data="ddp", ensemble=4, members=4, leads=2, spectral=False),
    "ensemble-domain": Case(1, 1, 2, ensemble=2, members=4, micro=2),
    "ensemble-tensor": Case(1, 2, 1, ensemble=2, members=2, leads=2),
    "columns": Case(1, 1, 2, columns=2, leads=2),
    "boxes": Case(1, 1, 4, columns=2, batch=2, micro=2),
    "spectral": Case(1, 1, 2, loss="spectral"),  # whole rows are there
    "uneven-boxes": Case(1, 1, 6, columns=3, leads=2),
    "dp-columns": Case(2, 1, 3, columns=3, batch=2, spectral=False),
    "dp-boxes-tensor": Case(2, 2, 2, columns=2),
    "boxes-ensemble": Case(1, 1, 4, columns=2, ensemble=2, members=2),
    "rows-energy": Case(1, 1, 2, columns=2, members=2, batch=2, micro=2, loss="energy"),
    "rows-spectral-crps": Case(1, 1, 2, columns=2, ensemble=2, members=4, leads=2, loss="spectral-crps"),
    "ensemble-hybrid": Case(2, 1, 1, replicate=2, ensemble=2, members=2),
}


def check(run_ranks, save_loc, case):
    for rank, counted in enumerate(run_ranks(case.world, _step, save_loc, case, timeout=900)):
        expected = derived(case, rank)
        assert counted - expected == Counter(), f"rank {rank}: more than derived"
        assert expected - counted == Counter(), f"rank {rank}: less than derived"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=[pytest.mark.slow] * (name == "mix")) for name, case in CASES.items()],
)
def test_a_step_sends_what_is_derived_and_nothing_else(run_ranks, save_loc, case):
    check(run_ranks, save_loc, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    representatives(list(MORE), "all", "ensemble"),
)
def test_so_does_every_other_way_to_train(run_ranks, save_loc, name):
    check(run_ranks, save_loc, MORE[name])
