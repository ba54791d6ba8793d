"""The arithmetic of layouts, and what sections demand of each other."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_like.schema.checks import layout, layout_findings, section_findings, world_of
from credit_like.schema.experiment import Experiment
from credit_like.schema.load import load_experiment
from credit_like.schema.trainer import TrainerSection
from tests.experiments import DEMO

sizes = st.integers(1, 12)


def trainer(tensor=1, domain=1, micro=1, total=1, data="fsdp2", replicate=1):
    return TrainerSection.model_validate(
        {
            "parallelism": {"data": data, "tensor": tensor, "domain": domain, "replicate": replicate},
            "micro_batch_size": micro,
            "global_batch_size": total,
        }
    )


@settings(deadline=None)
@given(sizes, sizes, sizes, sizes, sizes)
def test_every_layout_that_multiplies_out_is_accepted_and_divided_back(tensor, domain, data, micro, accumulation):
    world = tensor * domain * data
    at = layout(trainer(tensor, domain, micro, micro * data * accumulation), world)
    assert (at.world, at.tensor, at.domain, at.data, at.accumulation) == (world, tensor, domain, data, accumulation)


@settings(deadline=None)
@given(sizes, sizes, st.integers(1, 200), sizes, st.integers(1, 200))
def test_a_layout_is_accepted_only_if_its_parts_make_the_whole(tensor, domain, world, micro, total):
    section = trainer(tensor, domain, micro, total)
    if list(layout_findings(section, world)):
        with pytest.raises(ValueError, match="expected"):
            layout(section, world)
        assert world % (tensor * domain) or total % (micro * (world // (tensor * domain)))
    else:
        at = layout(section, world)
        assert at.data * at.tensor * at.domain == world
        assert at.data * at.accumulation * micro == total


@settings(deadline=None)
@given(sizes, sizes, st.integers(1, 200))
def test_the_batch_sizes_that_a_message_offers_are_accepted(micro, data, total):
    for _, message in layout_findings(trainer(micro=micro, total=total), data):
        offered = message.rsplit("change it to ", 1)[1].split(" or ")
        for size in map(int, offered):
            assert not list(layout_findings(trainer(micro=micro, total=size), data))


@settings(deadline=None)
@given(sizes, sizes, st.integers(1, 200))
def test_the_world_sizes_that_a_message_offers_are_accepted(tensor, domain, world):
    found = [message for path, message in layout_findings(trainer(tensor, domain), world) if path[-1] == "parallelism"]
    for message in found:
        for size in map(int, message.split("change it to ")[1].split(" processes")[0].split(" or ")):
            assert size % (tensor * domain) == 0


def test_replicas_need_data_parallelism_and_copies_divide_them():
    ((path, message),) = layout_findings(trainer(data="none", total=4), 4)
    assert path == ("trainer", "parallelism", "data")
    assert "4 // (1 × 1) = 4 data-parallel replicas" in message
    ((path, message),) = layout_findings(trainer(replicate=3, total=4), 4)
    assert path == ("trainer", "parallelism", "replicate")
    assert "change it to one of 1, 2, 4" in message


def experiment(**sections):
    base = {
        "name": "x",
        "save_loc": "runs/x",
        "data": {
            "source": {"type": "netcdf", "path": "x.nc"},
            "timestep": "6h",
            "prognostic": {"surface": ["a", "b"]},
            "train": ["2000-01-01", "2000-01-31"],
            "valid": ["2000-02-01", "2000-02-28"],
            "test": ["2000-03-01", "2000-03-31"],
        },
        "model": {"type": "persistence"},
    }
    data = {**base["data"], **sections.pop("data", {})}
    return Experiment.model_validate({**base, **sections, "data": data})


def keys(whole, world=1):
    return [".".join(map(str, path)) for path, _ in section_findings(whole, world)]


def test_the_world_is_what_the_batch_job_has():
    assert world_of(experiment()) == 1
    assert world_of(experiment(trainer={"parallelism": {"tensor": 2, "domain": 3}})) == 6
    assert world_of(experiment(pbs={"nodes": 8, "ngpus": 4})) == 32
    assert world_of(experiment(pbs={"nodes": 2, "processes": 3})) == 6
    assert world_of(experiment(pbs={"nodes": 2})) == 2


@pytest.mark.parametrize(
    ("sections", "wrong"),
    [
        ({}, []),
        ({"data": {"valid": ["2000-01-31", "2000-02-28"]}}, ["data.valid.0"]),
        ({"data": {"train": [["2000-01-01", "2000-01-10"], ["2000-01-10", "2000-01-31"]]}}, ["data.train.1"]),
        ({"data": {"diagnostic": {"surface": [{"name": "s", "compute": "solar"}]}}}, ["data.diagnostic.surface.0"]),
        ({"data": {"static": {"surface": [{"name": "s", "fill": "persist"}]}}}, ["data.static.surface.0"]),
        *(
            (
                {"data": {"dynamic_forcing": {"surface": [{"name": "s", "compute": "solar", key: value}]}}},
                [f"data.dynamic_forcing.surface.0.{key}"],
            )
            for key, value in (("path", "s.nc"), ("var", "sun"), ("fill", "persist"))
        ),
        ({"data": {"static": {"surface": [{"name": "s", "levels": [1]}]}}}, []),
        ({"data": {"static": {"surface": [{"name": "s", "levels": [1, 2]}]}}}, ["data.static.surface.0"]),
        ({"data": {"static": {"surface": ["s@5"]}}}, ["data.static.surface.0"]),
        ({"data": {"prognostic": {}}}, ["data.prognostic"]),
        ({"loss": {"type": "mse", "variable_weights": {"a": -1}}}, ["loss.variable_weights.a"]),
        ({"loss": {"type": "mse", "variable_weights": {"a": 0, "b": 0}}}, ["loss.variable_weights"]),
        ({"loss": {"type": "mse", "variable_weights": {"a": [1, 2, 3, 4, 5, 6]}}}, ["loss.variable_weights.a"]),
        ({"inference": {"ensemble": {"amplitude": {"c": 1}}}}, ["inference.ensemble.amplitude.c"]),
        ({"inference": {"init": ["2000-03-02", "2000-03-01", "6h"]}}, ["inference.init"]),
        ({"inference": {"init": ["2000-03-01", "2000-03-02", "9h"]}}, ["inference.init"]),
        ({"inference": {"lead": "7h"}}, ["inference.lead"]),
        ({"trainer": {"fsdp2_cpu_offload": True}}, []),
        ({"trainer": {"fsdp2_cpu_offload": True, "device": "cuda"}}, ["trainer.fsdp2_cpu_offload"]),
        ({"trainer": {"fsdp2_cpu_offload": True}, "pbs": {"ngpus": 1}}, ["trainer.fsdp2_cpu_offload"]),
        ({"trainer": {"fsdp2_cpu_offload": True, "device": "cpu"}, "pbs": {"ngpus": 1}}, []),
    ],
)
def test_sections_are_checked_against_each_other(sections, wrong):
    assert keys(experiment(**sections)) == wrong


def test_a_folder_under_a_file_is_no_place_for_a_run(tmp_path):
    (tmp_path / "file").write_text("")
    assert keys(experiment(save_loc=str(tmp_path / "file/run"))) == ["save_loc"]
    assert keys(experiment(save_loc=str(tmp_path / "new/run"))) == []
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["trainer.members=2", "loss.type=crps", "model.noise={channels: 4}"], None),
        (["trainer.members=2", "loss.type=crps"], "trainer.members"),
        (["trainer.members=2", "model.noise={channels: 4}"], "loss.type"),
        (["loss.type=crps"], "trainer.members"),
        (
            [
                "trainer.members=2", "loss.type=crps", "model.noise={channels: 4}",
                "trainer.phases=[{epochs: 1}, {epochs: 1, loss: {type: mse}}]",
            ],
            "trainer.phases.1.loss.type",
        ),
    ],
)  # fmt: skip
def test_members_need_noise_and_a_loss_of_ensembles_in_every_phase(settings, key):
    findings = list(section_findings(load_experiment(DEMO, settings), 1))
    assert [".".join(map(str, path)) for path, _ in findings] == ([] if key is None else [key])
