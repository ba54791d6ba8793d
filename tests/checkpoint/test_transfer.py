"""A run starts from the weights of another one, and what both predict is the same at the start."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from credit_like import build
from credit_like.check import checked_experiment
from credit_like.checkpoint import transfer
from credit_like.checkpoint.export import export, find, load_export
from credit_like.checkpoint.shards import named_pieces
from credit_like.data.statistics import fit_statistics
from credit_like.data.store import open_store
from credit_like.errors import UserError
from credit_like.inference.paths import forecast_path
from credit_like.models import wxformer
from credit_like.nn import spectral_norm
from credit_like.nn.init import initialise
from credit_like.schema.load import load_experiment
from credit_like.schema.origin import StartFrom
from credit_like.variables import Variables
from tests.experiments import BANDED_MODEL, DEMO, SHORT, SMALL_MODEL, representatives

HEIGHT, WIDTH = 32, 64
ROLES = ("prognostic", "diagnostic", "dynamic_forcing", "static")


def model_of(config, channels, seed):
    """A model whose u and v belong to its weights, as after some steps of training."""
    model = wxformer.build(
        config,
        in_channels=len(channels.inputs),
        out_channels=len(channels.outputs),
        frames=channels.frames,
        height=HEIGHT,
        width=WIDTH,
    )
    initialise(model, seed)
    for _ in range(20):
        spectral_norm.before_step(model)
    return model.eval()


def saved(path, model, config, roles, frames):
    """The file of a model, as an export or a translated one has it."""
    normalisation = {
        role: {
            "channels": names,
            "mean": [0.0] * len(names),
            "std": [1.0] * len(names),
            "change_std": [1.0] * len(names),
        }
        for role, names in roles.items()
    }
    metadata = {"model": {"config": config.model_dump(mode="json"), "frames": frames}, "normalisation": normalisation}
    save_file(dict(model.state_dict()), path, {key: json.dumps(value) for key, value in metadata.items()})
    return transfer.Source.open(StartFrom(path=str(path)))


@st.composite
def variable_sets(draw):
    """Channels of each role, in random order; a name never changes its role."""
    pool = {"prognostic": "abcd", "diagnostic": "ef", "dynamic_forcing": "gh", "static": "ij"}
    sets = {role: draw(st.lists(st.sampled_from(names), unique=True)) for role, names in pool.items()}
    sets["prognostic"] = sets["prognostic"] or ["a"]
    return sets


@settings(max_examples=12, deadline=None)
@given(
    there=variable_sets(),
    here=variable_sets(),
    frames=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    upsample=st.sampled_from(["pixel_shuffle", "transpose"]),
    normalised=st.booleans(),
    predict=st.sampled_from(["increment", "state"]),
)
@example(
    # The output that remains has a hundredth of the source's singular vector.
    there={"prognostic": ["a", "b", "c", "d"], "diagnostic": [], "dynamic_forcing": [], "static": []},
    here={"prognostic": ["a"], "diagnostic": [], "dynamic_forcing": [], "static": []},
    frames=(1, 1),
    upsample="transpose",
    normalised=True,
    predict="increment",
)
def test_what_two_sets_of_variables_have_in_common_is_predicted_alike(
    tmp_path_factory, there, here, frames, upsample, normalised, predict
):
    assume(set(there["prognostic"]) & set(here["prognostic"]))
    keys = {"upsample": upsample, "use_spectral_norm": normalised, "predict": predict, "dim": (8, 16, 32, 64)}
    theirs = transfer.Channels.of_roles(there, frames[0], predict)
    ours = transfer.Channels.of_roles(here, frames[1], predict)
    config = wxformer.Config(**keys)
    source_model = model_of(config, theirs, 1)
    source = saved(tmp_path_factory.mktemp("source") / "m.safetensors", source_model, config, there, frames[0])
    config = wxformer.Config(**keys, head_channels=max(len(theirs.outputs), len(ours.outputs)))
    model = model_of(config, ours, 2)
    plan = transfer.plan(source, model, config, ours, "error")
    transfer.load(source, plan, model, 2)
    spectral_norm.refresh(model)

    generator = torch.Generator().manual_seed(0)
    field = {name: torch.randn(2, 2, HEIGHT, WIDTH, generator=generator) for name in {*theirs.inputs, *ours.inputs}}

    def inputs(channels, known):
        x = torch.stack([field[n] if n in known else torch.zeros_like(field[n]) for n in channels.inputs], 1)
        x = x.clone()
        x[:, :, : 2 - min(frames)] = 0.0  # a frame that one of the two does not see
        return x[:, :, 2 - channels.frames :]

    with torch.no_grad():
        expected = source_model(inputs(theirs, ours.inputs))[:, :, 0]
        found = model(inputs(ours, ours.inputs))[:, :, 0]
    for i, name in enumerate(ours.outputs):
        want = expected[:, theirs.outputs.index(name)] if name in theirs.outputs else torch.zeros_like(found[:, i])
        torch.testing.assert_close(found[:, i], want, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_the_notes_list_what_is_taken_over_new_and_dropped(tmp_path):
    there = {"prognostic": ["a", "b"], "diagnostic": ["c"], "dynamic_forcing": [], "static": ["d"]}
    here = {"prognostic": ["b", "a"], "diagnostic": ["e"], "dynamic_forcing": ["f"], "static": ["d"]}
    config = wxformer.Config()
    theirs, ours = (transfer.Channels.of_roles(roles, 1, "increment") for roles in (there, here))
    source = saved(tmp_path / "m.safetensors", model_of(config, theirs, 1), config, there, 1)
    assert transfer.plan(source, model_of(config, theirs, 2), config, theirs, "error").notes == []
    config = wxformer.Config(head_channels=3)
    assert transfer.plan(source, model_of(config, ours, 2), config, ours, "error").notes == [
        "inputs of the source: b, a, d",
        "new inputs: f",
        "outputs of the source: change of b, change of a",
        "new outputs: e",
        "dropped outputs: c",
    ]


def test_new_inputs_and_outputs_get_gradients(tmp_path):
    roles = {"prognostic": ["a"], "diagnostic": [], "dynamic_forcing": [], "static": []}
    for upsample in ("pixel_shuffle", "transpose"):
        config = wxformer.Config(upsample=upsample, use_spectral_norm=True)
        there = transfer.Channels.of_roles(roles, 1, "increment")
        source = saved(tmp_path / f"{upsample}.safetensors", model_of(config, there, 1), config, roles, 1)
        here = transfer.Channels.of_roles(roles | {"prognostic": ["b", "a"]}, 1, "increment")
        model = model_of(config, here, 2)
        transfer.load(source, transfer.plan(source, model, config, here, "error"), model, 2)
        spectral_norm.refresh(model)
        x = torch.randn(1, 2, 1, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0))
        (model(x) - 1.0).square().mean().backward()
        last = model.head.last if upsample == "pixel_shuffle" else model.head.up
        gradient = last.weight.grad[0] if upsample == "pixel_shuffle" else last.weight.grad[:, 0]
        assert gradient.abs().max() > 0
        assert model.stages[0].embed.convs[0].weight.grad[:, 0].abs().max() > 0


def test_models_without_a_variable_in_common_have_no_weights_of_the_first_and_last_layers_in_common(tmp_path):
    roles = {"prognostic": ["a"], "diagnostic": [], "dynamic_forcing": [], "static": []}
    config = wxformer.Config(use_spectral_norm=True)
    there, here = (transfer.Channels.of_roles(roles | {"prognostic": [name]}, 1, "increment") for name in "ab")
    source = saved(tmp_path / "m.safetensors", model_of(config, there, 1), config, roles, 1)
    model = model_of(config, here, 2)
    with pytest.raises(UserError, match="expected some inputs of the source, got none"):
        transfer.plan(source, model, config, here, "error")
    plan = transfer.plan(source, model, config, here, "initial")
    assert {"stages.0.embed.convs.0.weight", "head.last.weight"} <= set(plan.initial)
    transfer.load(source, plan, model, 2)
    spectral_norm.refresh(model)
    assert model(torch.ones(1, 1, 1, HEIGHT, WIDTH)).isfinite().all()


@pytest.mark.parametrize("kind", ["decoder", "conditional-norm"])
def test_noise_is_added_to_a_model_without_it(tmp_path, kind):
    roles = {"prognostic": ["a"], "diagnostic": [], "dynamic_forcing": [], "static": []}
    channels = transfer.Channels.of_roles(roles, 1, "increment")
    plain, noisy = wxformer.Config(), wxformer.Config(noise={"type": kind, "channels": 4})
    before, model = model_of(plain, channels, 1), model_of(noisy, channels, 2)
    source = saved(tmp_path / "m.safetensors", before, plain, roles, 1)
    plan = transfer.plan(source, model, noisy, channels, "error")
    assert plan.initial
    assert all("noise." in name for name in plan.initial)
    transfer.load(source, plan, model, 2)
    spectral_norm.refresh(model)
    x = torch.randn(1, 1, 1, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(x, key_B=torch.tensor([7])), before(x), rtol=1e-5, atol=1e-5)
    source = saved(tmp_path / "n.safetensors", model, noisy, roles, 1)
    with pytest.raises(UserError, match=r"this model has no \S*noise\."):
        transfer.plan(source, before, plain, channels, "error")


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"predict": "state"}, "model.predict: expected 'increment' as in the source, got 'state'"),
        ({"dim": (8, 16, 32, 128)}, r"model.dim: expected \[8, 16, 32, 64\] as in the source"),
        ({"upsample": "transpose"}, "model.upsample: expected 'pixel_shuffle' as in the source"),
        ({}, "model.head_channels: expected at least 2 as in the source, whose outputs share them, got 1"),
    ],
)
def test_a_model_that_cannot_keep_the_function_is_refused(tmp_path, keys, told):
    roles = {"prognostic": ["a"], "diagnostic": ["b"], "dynamic_forcing": [], "static": []}
    config = wxformer.Config()
    there = transfer.Channels.of_roles(roles, 1, "increment")
    source = saved(tmp_path / "m.safetensors", model_of(config, there, 1), config, roles, 1)
    config = wxformer.Config(**keys)
    here = transfer.Channels.of_roles(roles | {"diagnostic": [] if not keys else ["b"]}, 1, config.predict)
    model = model_of(config, here, 2)
    with pytest.raises(UserError, match=told):
        transfer.plan(source, model, config, here, "error")
    plan = transfer.plan(source, model, config, here, "initial")
    assert any("not taken over" in note for note in plan.notes)
    before = {name: piece.local.clone() for name, piece in named_pieces(model).items()}
    transfer.load(source, plan, model, 2)
    after = named_pieces(model)
    assert all(torch.equal(after[name].local, before[name]) for name in plan.initial)
    assert all(
        torch.equal(after[name].local, source_value) for name, source_value in values(source, plan.direct).items()
    )


def values(source, names):
    return {name: source.read(name) for name in names}


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda path: None, "got nothing at"),
        (lambda path: path.write_bytes(b"garbage"), "expected a run, a checkpoint or an export"),
        (lambda path: save_file({"x": torch.zeros(1)}, path), "without metadata `model`"),
        (lambda path: path.mkdir(), "expected a checkpoint in .* train first"),
    ],
)
def test_what_holds_no_weights_is_one_message(tmp_path, made, told):
    made(tmp_path / "m.safetensors")
    with pytest.raises(UserError, match=told):
        transfer.Source.open(StartFrom(path=str(tmp_path / "m.safetensors")))


# ---- whole runs ------------------------------------------------------------------------------------------------------


FITTING = (
    SMALL_MODEL,
    "trainer.scheduler={type: constant}",
    "trainer.global_batch_size=4",
    "trainer.micro_batch_size=1",
    "inference.init=[2000-01-12, 2000-01-12T06, 6h]",
    "inference.lead=12h",
)


def experiment(folder, *overrides):
    trainer = ("trainer.epochs=1", "trainer.batches_per_epoch=2", "trainer.loader.num_workers=0")
    return load_experiment(DEMO, [*SHORT, *FITTING, *trainer, f"save_loc={folder}", *overrides])


def started(wanted, runtime_of):
    """The context of a run as it is before its first step."""
    context = build.build_context(wanted, runtime_of)
    build.build_trainer(context).state.start()
    return context


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    assert build.train(experiment(folder)) == 0
    return folder


def stepped(context, at_mean=()):
    """The first forecast from the store's first time, with some inputs at their mean, by channel name, in physical units."""
    stepper, variables, store = context.stepper.eval(), context.variables, context.store
    with torch.no_grad():
        prognostic = torch.from_numpy(store.read(variables.role("prognostic"), [0])).movedim(0, 1)[None]
        for channel, name in enumerate(variables.channel_names(variables.role("prognostic"))):
            if name in at_mean:
                prognostic[:, channel] = float(context.statistics.dataset["mean"].sel(channel=name))
        forcing = torch.zeros(1, variables.n("dynamic_forcing"), 1, *prognostic.shape[-2:])
        after = stepper(stepper.initial(prognostic, torch.zeros(1, dtype=torch.int64)), forcing)
    names = variables.channel_names(variables.outputs)
    return dict(zip(names, stepper.outputs(after)[0], strict=True))


CHANGES = {
    "the same": (),
    "a variable less": ("data.diagnostic={surface: []}", SMALL_MODEL.replace("}", ", head_channels: 8}")),
    "reordered": ("data.levels=[2, 1]", "data.prognostic={level: [height, v, u], surface: [column_water]}"),
    "a forcing more": ("data.dynamic_forcing={surface: [{name: toa, compute: solar}]}",),
    "a transform less": (
        "data.diagnostic={surface: [{name: precipitation, transform: log1p}]}",
        SMALL_MODEL.replace("}", ", head_channels: 8}"),
    ),
    "other statistics": ("data.train=[2000-01-02, 2000-01-07]",),
}


@pytest.mark.parametrize(
    ("kind", "change"),
    [*(("run", change) for change in CHANGES), ("export", "other statistics"), ("prepared", "other statistics")],
)
def test_the_first_forecast_is_the_source_s(pretrained, tmp_path, change, kind):
    path = export(pretrained, tmp_path / "m.safetensors") if kind == "export" else pretrained
    if kind == "prepared":  # `credit-like preprocess` has written the statistics before
        data = experiment(tmp_path / "fine", *CHANGES[change]).data
        variables = Variables(data)
        fit_statistics(open_store(data, variables), variables, data).save(tmp_path / "fine" / "statistics.nc")
    runtime = build.start(experiment(pretrained))
    with runtime:
        before = build.build_context(experiment(pretrained), runtime, train=False)
        build.load_weights(before)
        wanted = experiment(tmp_path / "fine", f"start_from={path}", *CHANGES[change])
        after = started(wanted, runtime)
        expected, found = stepped(before), stepped(after)
    assert found.keys() == expected.keys() - ({"precipitation"} if change == "a variable less" else set())
    if change == "a transform less":  # the output is another one, and starts at its mean
        found.pop("precipitation")
    for name, field in found.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(field, expected[name], rtol=0, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ("data.prognostic={level: [u, v, height], surface: []}", ["column_water"]),
        ("data.prognostic={level: [u, height], surface: [column_water]}", ["v@1", "v@2"]),
        ("data.levels=[2]", ["u@1", "v@1", "height@1"]),
    ],
    ids=["at the surface", "on levels", "a level"],
)
def test_variables_that_are_removed_count_as_their_mean(pretrained, tmp_path, change, lost):
    """What is left is predicted as by the source from their mean."""
    head = SMALL_MODEL.replace("}", ", head_channels: 8}")
    source = experiment(pretrained)
    with build.start(source) as runtime:
        before = build.build_context(source, runtime, train=False)
        build.load_weights(before)
        after = started(experiment(tmp_path / "less", f"start_from={pretrained}", head, change), runtime)
        expected, found = stepped(before, at_mean=lost), stepped(after)
    assert found.keys() == expected.keys() - set(lost)
    for name, field in found.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(field, expected[name], rtol=0, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("fitted", ["by the source", "elsewhere"])
def test_statistics_that_are_named_and_not_used_are_said(pretrained, tmp_path, caplog, fitted):
    """The weights need those of the source; a file with the same ones needs no word."""
    named = pretrained / "statistics.nc"
    if fitted == "elsewhere":
        data = experiment(tmp_path, *CHANGES["other statistics"]).data
        variables = Variables(data)
        named = tmp_path / "named.nc"
        fit_statistics(open_store(data, variables), variables, data).save(named)
    changes = CHANGES["other statistics"] if fitted == "elsewhere" else ()
    wanted = experiment(tmp_path / "fine", f"start_from={pretrained}", f"data.statistics={named}", *changes)
    with build.start(wanted) as runtime, caplog.at_level("WARNING"):
        build.build_context(wanted, runtime)
    assert ("those of data.statistics are for the others" in caplog.text) == (fitted == "elsewhere")


def test_data_in_other_units_than_the_source_s_are_refused(pretrained, tmp_path):
    fields = "data.prognostic={{level: [{{name: u, units: {}}}, v, {{name: height, units: km}}], surface: []}}"
    overrides = [*SHORT, *FITTING, f"start_from={pretrained}", f"save_loc={tmp_path / 'fine'}", fields.format("knots")]
    message = r"in the units of .*, got others: u in 'm s-1' \(got 'knots'\), height in 'm' \(got 'km'\); give these"
    with pytest.raises(UserError, match=f"(?s)start_from.path.*{message}"):
        checked_experiment(DEMO, overrides)
    with pytest.raises(UserError, match=f"^start_from.path: expected data {message}"):
        build.train(load_experiment(DEMO, overrides))
    assert not (tmp_path / "fine" / "statistics.nc").exists()
    data = load_experiment(DEMO, [*overrides, fields.format("m/s").replace("km", "m")]).data
    source = transfer.Source.open(StartFrom(path=str(pretrained)))
    transfer.refuse_other_units(source, open_store(data, Variables(data)))


def test_variables_that_are_added_start_at_rest(tmp_path):
    """What the source predicts is unchanged, a new prognostic variable does not change, and a new diagnostic is at its mean."""
    dry = ("data.prognostic={level: [u, v, height], surface: []}", "data.diagnostic={surface: []}")
    source = experiment(tmp_path / "dry", *dry)
    assert build.train(source) == 0
    with build.start(source) as runtime:
        before = build.build_context(source, runtime, train=False)
        build.load_weights(before)
        after = started(experiment(tmp_path / "moist", f"start_from={tmp_path / 'dry'}"), runtime)
        expected, found = stepped(before), stepped(after)
    variables, store = after.variables, after.store
    water = variables.channel_names(variables.role("prognostic")).index("column_water")
    initial = store.read(variables.role("prognostic"), [0])
    expected["column_water"] = torch.from_numpy(initial[0, water])
    rain = store.read(variables.role("diagnostic"), store.period(after.experiment.data.train))
    expected["precipitation"] = torch.full_like(found["precipitation"], float(rain.mean(dtype=float)))
    assert found.keys() == expected.keys()
    for name, field in found.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(field, expected[name], rtol=0, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


def test_forecasts_need_no_training(pretrained, tmp_path):
    """A run without a checkpoint forecasts with the weights of its source, and says so."""
    when = ("inference.init=[2000-01-11]", "inference.lead=6h")
    there = experiment(pretrained, *when, f"inference.output.path={tmp_path / 'there'}")
    here = experiment(tmp_path / "fine", f"start_from={pretrained}", *when, "data.levels=[2, 1]")
    for one in (there, here):
        assert build.rollout(one) == 0
    expected, found = (xr.open_zarr(forecast_path(one)).load() for one in (there, here))
    assert found.attrs["checkpoint"].startswith("start_from ")
    assert found["level"].values.tolist() == [2, 1]
    for name in expected.data_vars:
        field = found[name].reindex_like(expected[name])
        np.testing.assert_allclose(field, expected[name], rtol=0, atol=1e-5 * float(abs(expected[name]).max()))
    with pytest.raises(UserError, match=r"model"):
        build.rollout(experiment(tmp_path / "other", f"start_from={pretrained}", *when, BANDED_MODEL))
    with pytest.raises(UserError, match="run `credit-like train` first"):
        build.rollout(experiment(tmp_path / "other", f"start_from={{path: {pretrained}, lora: {{rank: 2}}}}", *when))


@pytest.mark.slow
def test_the_run_s_own_checkpoints_win_and_remember_their_origin(pretrained, tmp_path):
    source = export(pretrained, tmp_path / "source.safetensors")
    wanted = experiment(tmp_path / "fine", f"start_from={source}")
    assert build.train(wanted) == 0
    origin = find(tmp_path / "fine").meta["origin"]
    assert origin["experiment"] == "demo"
    assert origin["step"] == find(pretrained).step
    assert json.loads((tmp_path / "fine/status.json").read_text())["origin"] == origin
    source.unlink()
    more = experiment(tmp_path / "fine", f"start_from={source}", "trainer.epochs=2")
    assert build.train(more) == 0
    newest = find(tmp_path / "fine")
    assert newest.step == 4
    assert newest.meta["origin"] == origin
    assert load_export(export(tmp_path / "fine", tmp_path / "again.safetensors")).metadata["origin"] == origin


def test_frozen_weights_stay_and_have_no_state(pretrained, tmp_path):
    wanted = experiment(tmp_path / "fine", f"start_from={{path: {pretrained}, weights: raw, freeze: ['stages.*']}}")
    assert build.train(wanted) == 0
    before, after = find(pretrained), find(tmp_path / "fine")
    names = [name for name in after.names("model/") if name.startswith("model/stages.")]
    assert names
    assert all(torch.equal(before.read(name), after.read(name)) for name in names)
    assert any(not torch.equal(before.read(n), after.read(n)) for n in after.names("model/head."))
    assert not [name for name in after.names() if name.startswith(("ema/stages", "optimizer/")) and ".stages" in name]
    assert not [name for name in after.names("ema/") if name.startswith("ema/stages.")]


def test_frozen_layers_have_the_same_sigma_at_the_start_and_after_a_restart(tmp_path):
    """To the bit: theirs is not computed anew in every step, as that of the others is."""
    source, fine = tmp_path / "source", tmp_path / "fine"
    assert build.train(experiment(source, BANDED_MODEL)) == 0
    section = f"start_from={{path: {source}, weights: raw, freeze: ['stages.*']}}"
    wanted, sigmas = experiment(fine, BANDED_MODEL, section), []
    for restarted in (False, True):
        with build.start(wanted) as runtime:
            state = build.build_trainer(build.build_context(wanted, runtime)).state
            if restarted:
                state.restore(find(fine))
            else:
                state.start()
                state.save()
                state.manager.wait()
            layers = spectral_norm.layers(state.model)
            sigmas.append({n: m.spectral.inv_sigma.clone() for n, m in layers if not m.weight.requires_grad})
    assert len(sigmas[0]) > 10
    assert [name for name, sigma in sigmas[0].items() if not torch.equal(sigma, sigmas[1][name])] == []


@pytest.mark.slow
def test_the_state_of_the_optimiser_is_taken_over(pretrained, tmp_path):
    wanted = experiment(tmp_path / "fine", f"start_from={{path: {pretrained}, weights: raw, optimizer: true}}")
    with build.start(wanted) as runtime:
        state = build.build_trainer(build.build_context(wanted, runtime)).state
        state.start()
        source = find(pretrained)
        moments = {name: piece for name, piece in state.pieces().items() if name.startswith("optimizer/")}
        assert moments
        for name, piece in moments.items():
            np.testing.assert_array_equal(piece.local.numpy(), source.read(name).numpy())


def fine_tuned(rank, folder, source, parallelism):
    section = f"{{path: {source}, weights: raw, freeze: ['stages.1.*', '*.bias']}}"
    more = ("data.dynamic_forcing={surface: [{name: toa, compute: solar}]}", "data.levels=[2, 1]")
    wanted = experiment(folder, f"start_from={section}", f"trainer.parallelism={parallelism}", *more, BANDED_MODEL)
    return build.train(wanted)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    source, folder = tmp_path_factory.mktemp("banded"), tmp_path_factory.mktemp("one")
    assert build.train(experiment(source, BANDED_MODEL)) == 0
    assert fine_tuned(0, folder, source, "{}") == 0
    return source, find(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallelism",
    representatives(["{data: fsdp2}", "{data: ddp}", "{tensor: 2}", "{domain: 2}"], "{data: fsdp2}", "{domain: 2}"),
)
def test_every_layout_starts_alike_and_trains_the_same_parameters(one_process, run_ranks, tmp_path, parallelism):
    source, expected = one_process
    assert run_ranks(2, fine_tuned, tmp_path / "fine", source, parallelism) == [0, 0]
    found = find(tmp_path / "fine")
    assert found.names("optimizer/") == expected.names("optimizer/")
    assert found.names("model/") == expected.names("model/")
    for name in found.names("model/"):
        if name.startswith("model/stages.1.") or name.endswith(".bias"):
            # Weights that do not train have the source's bits; those of the last layer follow their channels.
            torch.testing.assert_close(found.read(name), expected.read(name), rtol=0, atol=0)
        else:
            torch.testing.assert_close(found.read(name), expected.read(name), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("{path: SOURCE, freeze: ['nothing.*']}", "nothing.*, which matches none"),
        ("{path: SOURCE, freeze: ['*']}", "which match all"),
        ("{path: /nowhere}", "got nothing at /nowhere"),
        ("{path: SOURCE, extra: 1}", "extra"),
    ],
)
def test_a_section_that_cannot_work_is_refused_before_anything_is_written(pretrained, tmp_path, section, told):
    settings = [*SHORT, *FITTING, f"save_loc={tmp_path / 'fine'}"]
    settings.append(f"start_from={section.replace('SOURCE', str(pretrained))}")
    with pytest.raises((UserError, ValueError), match=re.escape(told)):
        checked_experiment(DEMO, settings)
    with pytest.raises((UserError, ValueError), match=re.escape(told)):
        build.train(load_experiment(DEMO, settings))
    assert not (tmp_path / "fine").exists()


def test_check_finds_nothing_wrong_with_a_source_that_fits(pretrained, tmp_path):
    settings = [*SHORT, *FITTING, f"save_loc={tmp_path / 'fine'}"]
    checked_experiment(DEMO, [*settings, f"start_from={pretrained}", *CHANGES["a forcing more"]])
