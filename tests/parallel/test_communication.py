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

    @property
    def world(self) -> int:
        return self.dp * self.ensemble * self.tensor * self.domain

    @property
    def forecasts(self) -> int:
        """What a rank computes at once: its members of the samples of a micro-batch."""
        return self.batch * self.members // self.ensemble

    def settings(self) -> list[str]:
        layout = f"data: {self.data}, tensor: {self.tensor}, domain: {self.domain}, replicate: {self.replicate}"
        members = [f"model.noise={{channels: {NOISE}}}", "loss={type: crps}"] if self.members > 1 else []
        return [
            *members,
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


# ---- rows ------------------------------------------------------------------------------------------------------------

PADDED = HEIGHT + NORTH + SOUTH
STAGES = [PADDED // 2 ** (stage + 1) for stage in range(4)]  # 32, 16, 8, 4
COLUMNS = [(WIDTH + WEST + EAST) // 2 ** (stage + 1) for stage in range(4)]
# Bands are whole windows where there is attention, and whole pairs of rows after a pixel shuffle.
UNITS = {height: math.lcm(WINDOW, 2) for height in STAGES} | {2 * STAGES[0]: 2}


def bands(height: int, parts: int) -> list[range]:
    """Contiguous bands of whole units; the first ones have one more where they do not come out even."""
    unit = UNITS.get(height, 1)
    counts = [height // unit // parts + (i < height // unit % parts) for i in range(parts)]
    starts = [unit * sum(counts[:i]) for i in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


@dataclass(frozen=True)
class Exchange:
    """have, want: rows of each rank; `row`: elements of one row of one sample; `constant`: of data, without gradient."""

    have: list[range]
    want: list[list[int]]
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


def window(rows: range, height: int, kernel: int, stride: int) -> list[int]:
    """Rows under a kernel that is centred as far as its size allows, inside the image."""
    before = (kernel - stride) // 2
    first, last = rows[0] * stride - before, rows[-1] * stride - before + kernel
    return [row for row in range(first, last) if 0 <= row < height]


def mirrored(row: int) -> int:
    """The image row behind a padded one: over the pole and back down the other side."""
    row -= NORTH
    return -1 - row if row < 0 else 2 * HEIGHT - 1 - row if row >= HEIGHT else row


def halo(height: int, columns: int, channels: int, n: int) -> Exchange:
    return Exchange(bands(height, n), [window(b, height, 3, 1) for b in bands(height, n)], columns * channels)


def exchanges(n: int) -> list[Exchange]:
    """All of one forward, in order."""
    found = [Exchange(bands(HEIGHT, n), [[mirrored(r) for r in b] for b in bands(PADDED, n)], IN * WIDTH, True)]
    height, columns, channels = PADDED, WIDTH + WEST + EAST, IN
    for stage, dim in enumerate(DIM):
        want = [window(b, height, max(KERNELS[stage]), STRIDE) for b in bands(STAGES[stage], n)]
        found.append(Exchange(bands(height, n), want, columns * channels, constant=stage == 0))
        height, columns, channels = STAGES[stage], COLUMNS[stage], dim
        for _ in range(DEPTH[stage] if STRIDES_OF_LONG[stage] > 1 else 0):
            apart = height // STRIDES_OF_LONG[stage]
            shares = [len(range(i, apart, n)) for i in range(n)]  # the first ones have one more
            groups = [
                [a * apart + sum(shares[:i]) + y for a in range(STRIDES_OF_LONG[stage]) for y in range(shares[i])]
                for i in range(n)
            ]
            there = Exchange(bands(height, n), groups, columns * dim)
            back = Exchange(groups, [list(b) for b in bands(height, n)], columns * dim)
            found += [there, back]
    for stage, (channels, outputs) in zip((3, 2, 1), DECODER, strict=True):
        found.append(enlarging(STAGES[stage], COLUMNS[stage], channels, n))
        found += [halo(2 * STAGES[stage], 2 * COLUMNS[stage], outputs, n)] * 3
    found.append(enlarging(STAGES[0], COLUMNS[0], HEAD[0], n))
    decoded, columns = 2 * STAGES[0], 2 * COLUMNS[0]
    found.append(halo(decoded, columns, OUT, n))
    left = decoded - NORTH - SOUTH
    found.append(Exchange(bands(decoded, n), [[r + NORTH for r in b] for b in bands(left, n)], OUT * columns))
    found.append(Exchange(bands(left, n), [between(b, left) for b in bands(HEIGHT, n)], OUT * (columns - WEST - EAST)))
    return [exchange for exchange in found if exchange.needed]


def enlarging(height: int, columns: int, channels: int, n: int) -> Exchange:
    """The convolution before a pixel shuffle: to half the bands of the larger image."""
    halves = [range(b.start // 2, b.stop // 2) for b in bands(2 * height, n)]
    return Exchange(bands(height, n), [window(b, height, 3, 1) for b in halves], columns * channels)


def between(rows: range, height: int) -> list[int]:
    """The rows that bilinear interpolation to HEIGHT rows reads, pixel centres aligned."""
    places = [max((row + 0.5) * height / HEIGHT - 0.5, 0.0) for row in rows]
    return list(range(math.floor(places[0]), min(math.floor(places[-1]) + 2, height)))


# ---- the step --------------------------------------------------------------------------------------------------------


def derived(case: Case, rank: int) -> Counter:
    """(kind, ranks, bytes) → number of times in one optimiser step."""
    *_, band = case.place(rank)
    world, tensor_peers, domain_peers = case.group(rank), case.group(rank, 0, 1, 3), case.group(rank, 0, 1, 2)
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
        rows = len(bands(STAGES[stage], case.domain)[band])
        share = len(range(band, STAGES[stage] // STRIDES_OF_LONG[stage], case.domain)) * STRIDES_OF_LONG[stage]
        long_rows = share if STRIDES_OF_LONG[stage] > 1 else rows
        layers = DEPTH[stage] * forwards
        for height, size in ((rows, WINDOW), (long_rows, STRIDES_OF_LONG[stage])):
            image = case.forecasts * height * COLUMNS[stage] * dim * FLOAT
            add("all-reduce", tensor_peers, image, 2 * layers)
            add("all-reduce", tensor_peers, size**4 * FLOAT, layers if size > 1 else 0)
        add("all-reduce", tensor_peers, case.forecasts * rows * COLUMNS[stage] * dim * FLOAT, 4 * layers)

    # The gradients of what tensor ranks hold alike, averaged over them in one message.
    if case.tensor > 1:
        at, n = (shards.index(rank), len(shards)) if case.data == "fsdp2" else (0, 1)
        alike = [w.shape for unit in every_unit for w in unit if w.split is None]
        rows_of = [range(shape[0])[at * -(-shape[0] // n) :][: -(-shape[0] // n)] for shape in alike]
        size = sum(len(rows) * math.prod(shape[1:]) for rows, shape in zip(rows_of, alike, strict=True)) * FLOAT
        add("all-reduce", tensor_peers, size)

    # Domain: the exchanges and their reverses, and the statistics of two group norms in each block of the decoder.
    if case.domain > 1:
        for exchange in exchanges(case.domain):
            size = case.forecasts * exchange.row * FLOAT
            add("all-to-all", domain_peers, exchange.sent(band) * size, forwards)
            # what the data alone determine has no gradient: pads and the first embedding of the first lead
            backwards = forwards - case.micro if exchange.constant else forwards
            add("all-to-all", domain_peers, exchange.returned(band) * size, backwards)
        add("all-gather", domain_peers, case.domain * 3 * case.forecasts * GROUPS * FLOAT, 6 * forwards)
        add("all-reduce", domain_peers, 2 * case.forecasts * GROUPS * FLOAT, 6 * forwards)

    # Ensemble: the predictions of this rank's members to every other rank, once for each, and nothing in backward.
    fields = case.forecasts * OUT * len(bands(HEIGHT, case.domain)[band]) * WIDTH
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
    "ensemble-hybrid": Case(2, 1, 1, replicate=2, ensemble=2, members=2),
}


def check(run_ranks, save_loc, case):
    for rank, counted in enumerate(run_ranks(case.world, _step, save_loc, case, timeout=500)):
        expected = derived(case, rank)
        assert counted - expected == Counter(), f"rank {rank}: more than derived"
        assert expected - counted == Counter(), f"rank {rank}: less than derived"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step_sends_what_is_derived_and_nothing_else(run_ranks, save_loc, case):
    check(run_ranks, save_loc, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", representatives(list(MORE), "muon", "mix", "all", "ensemble", "ensemble-domain"))
def test_so_does_every_other_way_to_train(run_ranks, save_loc, name):
    check(run_ranks, save_loc, MORE[name])
