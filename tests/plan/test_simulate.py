"""What a simulated rank counts equals what the ranks of a real gloo run do."""

from __future__ import annotations

import pytest

from credit_like.plan.events import Run
from credit_like.plan.layouts import Candidate
from credit_like.plan.simulate import AVERAGE, OPTIMIZER, PARAMETERS, SAMPLE, places, within
from credit_like.schema.origin import StartFrom
from tests.experiments import representatives

MEMBERS = {"members": 4, "model": {"noise": {"channels": 3}}, "loss": {"type": "crps"}}
LAYOUTS = [
    (Candidate(4), {"global_batch_size": 20}),  # five micro-batches: more than are simulated
    (Candidate(2, domain=2), {"activation_checkpoint": True}),
    (Candidate(2, tensor=2), {}),
    (Candidate(1, 2, 2), {"forecast_len": 2}),
    (Candidate(4, replicate=2), {}),
    (Candidate(2, domain=2, replicate=2), {}),
    (Candidate(4, data="ddp"), {}),
    (Candidate(1, domain=2, data="none"), {}),
    (Candidate(1, data="none"), {}),
    (Candidate(1, ensemble=2), MEMBERS),
    (Candidate(1, domain=2, ensemble=2), MEMBERS | {"forecast_len": 2}),
    (Candidate(1, domain=4, columns=2), {}),
    (Candidate(2, tensor=2, data="ddp"), {}),
]


def compare(run_ranks, small, simulate, layout, section):
    experiment = small.experiment(**{"global_batch_size": 2 * layout.dp} | section)
    done = run_ranks(layout.world, small.real, experiment, layout, timeout=900)
    for rank in sorted({0, layout.world - 1}):
        plan = simulate(experiment, layout, rank)
        assert plan.messages == done[rank].messages
        assert plan.flops == done[rank].flops
        assert {part: plan.parts[part] for part in done[rank].kept} == done[rank].kept
        peak = plan.peak - plan.parts[SAMPLE]
        # The same tensors, told by their storages; the interpreter may drop one a moment sooner or later.
        assert peak == pytest.approx(done[rank].peak, rel=0.1)
        assert peak == pytest.approx(done[rank].allocated, rel=0.1)  # whatever torch allocated, told by its allocator


@pytest.mark.slow
def test_bands_do_what_the_plan_says(run_ranks, small, simulate):
    compare(run_ranks, small, simulate, *LAYOUTS[7])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "section"),
    [LAYOUTS[-1], *(pytest.param(*case, marks=pytest.mark.long) for case in LAYOUTS[:-1])],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_every_kind_of_layout_does_what_the_plan_says(run_ranks, small, simulate, layout, section):
    compare(run_ranks, small, simulate, layout, section)


FROZEN = {
    "fsdp2": Candidate(2),
    "ddp": Candidate(2, data="ddp"),
    "tensor": Candidate(1, tensor=2, data="none"),
    "domain": Candidate(1, domain=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", representatives(FROZEN, "fsdp2"))
def test_frozen_parameters_cost_no_gradient_no_state_and_no_message(run_ranks, small, simulate, kind):
    """Counted by the plan and in a real run: what is left belongs to the head, which alone is trained."""
    layout = FROZEN[kind]

    def with_frozen(*freeze):
        experiment = small.experiment(global_batch_size=2)
        return experiment.model_copy(update={"start_from": StartFrom(path="elsewhere", freeze=freeze)})

    def part(freeze):
        experiment = with_frozen(*freeze)
        done = run_ranks(layout.world, small.real, experiment, layout, timeout=900)[0]
        plan = simulate(experiment, layout)
        assert plan.messages == done.messages
        assert {part: plan.parts[part] for part in done.kept} == done.kept
        return plan

    whole, frozen = part(()), part(("stages.*", "up*"))
    assert frozen.parameters == whole.parameters
    assert frozen.parts[PARAMETERS] == whole.parts[PARAMETERS]
    head = frozen.parts[AVERAGE]  # one number for each trained one
    assert 0 < head < whole.parts[AVERAGE] / 5
    assert frozen.parts[OPTIMIZER] <= 2 * head + 1000
    reduced = "reduce-scatter" if layout.data == "fsdp2" else "all-reduce"
    sent = [sum(m.bytes * n for m, n in plan.messages.items() if m.kind == reduced) for plan in (whole, frozen)]
    # Tensor ranks send activations besides, forward and backward, whatever is trained.
    assert sent[1] < sent[0] / (5 if layout.tensor == 1 else 1)
    assert frozen.flops < whole.flops


@pytest.mark.slow
@pytest.mark.parametrize("kind", representatives(FROZEN, "ddp"))
def test_low_rank_changes_cost_their_own_gradients_and_state_alone(run_ranks, small, simulate, kind):
    """Counted by the plan and in a real run."""
    layout, experiment = FROZEN[kind], small.experiment(global_batch_size=2)
    lora = {"rank": 2, "match": ["*.qkv", "*.contract"]}
    source = StartFrom.model_validate({"path": "elsewhere", "lora": lora})
    changed = experiment.model_copy(update={"start_from": source})
    done = run_ranks(layout.world, small.real, changed, layout, timeout=900)[0]
    plan, whole = simulate(changed, layout), simulate(experiment, layout)
    assert plan.messages == done.messages
    assert {part: plan.parts[part] for part in done.kept} == done.kept
    assert 0 < plan.parts[OPTIMIZER] < whole.parts[OPTIMIZER] / 5


@pytest.mark.slow
def test_nothing_is_allocated_for_real(small, simulate):
    """A model whose activations alone would need a hundred times what the process may grow by."""

    def simulated(micro_batch):
        experiment = small.experiment(micro_batch_size=micro_batch, global_batch_size=2 * micro_batch)
        return simulate(experiment, Candidate(2), gpu=True)

    one, two, large = simulated(1), simulated(2), simulated(256)
    assert large.parts["activations"] > 2**30
    assert large.resident - one.resident < large.parts["activations"] / 100
    # The spectral norms of the weights cost the same for every size of batch.
    assert large.flops - one.flops == 255 * (two.flops - one.flops)


@pytest.mark.long
def test_of_random_forecasts_the_longest_is_simulated(small, simulate):
    """At seed 0 the first step of a training would take fewer than eight."""
    found = []
    for random in (True, False):
        experiment = small.experiment(forecast_len=8, random_forecast_len=random, global_batch_size=1)
        found.append(simulate(experiment, Candidate(1, data="none")))
    assert found[0].parts == found[1].parts
    assert found[0].flops == found[1].flops


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "narrow"), [("high", True), ("highest", False)])
def test_float32_is_multiplied_as_the_training_does(small, simulate, precision, narrow):
    """The power iterations of spectral norms have no TensorFloat-32 in either."""
    experiment = small.experiment(global_batch_size=1, matmul_precision=precision, model={"use_spectral_norm": True})
    rank = simulate(experiment, Candidate(1, data="none"), gpu=True)
    flops = dict.fromkeys(("half", "tf32", "wide"), 0)
    for event in rank.events:
        if isinstance(event, Run):
            for (arithmetic, operations, _), times in event.pieces.items():
                flops[arithmetic] += times * operations
    assert flops["half"] == 0
    assert (flops["tf32"] > 10 * flops["wide"] > 0) is narrow
    assert sum(flops.values()) == rank.flops


def test_boxes_at_the_ends_and_within_are_simulated():
    assert places(Candidate(1, domain=6, columns=2)) == [0, 1, 2, 3, 4, 5]
    assert places(Candidate(2, domain=16, columns=4)) == [0, 1, 3, 4, 5, 7, 12, 13, 15]


def test_a_plan_of_all_layouts_takes_interior_columns_alone():
    assert within(Candidate(2, domain=16, columns=4)) == [1, 5, 13]
    assert within(Candidate(1, domain=6, columns=2)) == [0, 2, 4]
    assert within(Candidate(1, 1, 4)) == places(Candidate(1, 1, 4)) == [0, 1, 3]


def test_first_interior_and_last_band_are_simulated():
    assert [places(Candidate(1, 1, bands)) for bands in (1, 2, 3, 4, 5)] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 3],
        [0, 2, 4],
    ]
