"""CREDIT's experiments become experiments of ours, and no key of theirs is dropped silently."""

from __future__ import annotations

import copy
import json
import os
import sys
from base64 import b64encode
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
import yaml

from credit_like import cli, transforms
from credit_like.checkpoint import transfer
from credit_like.checkpoint.credit_scalers import read_scalers
from credit_like.data.files import netcdf_files
from credit_like.data.statistics import Statistics
from credit_like.errors import UserError
from credit_like.migrate import Document, blocks, read, report, run, translate, written
from credit_like.models import wxformer
from credit_like.nn import spectral_norm
from credit_like.schema.data import DataSection
from credit_like.schema.load import load_experiment
from credit_like.variables import Variables

FIRST = """
save_loc: '/scratch/$USER/runs/first/'
seed: 7
data:
  variables: ['U', 'V', 'T', 'Q']
  save_loc: '/data/ERA5_1deg_6h*'
  level_ids: [1., 60., 137.]
  surface_variables: ['SP', 't2m']
  save_loc_surface: '/data/ERA5_1deg_6h*'
  dynamic_forcing_variables: ['tsi']
  save_loc_dynamic_forcing: '/data/solar_*.nc'
  diagnostic_variables: ['rain', 'evaporation']
  save_loc_diagnostic: '/data/ERA5_1deg_6h*'
  static_variables: ['z', 'lsm']
  save_loc_static: '/data/static.nc'
  mean_path: '/data/mean.nc'
  std_path: '/data/std_residual.nc'
  train_years: [1979, 2014]
  valid_years: [2014, 2018]
  scaler_type: 'std_new'
  history_len: 1
  forecast_len: 3
  lead_time_periods: 6
  one_shot: True
  static_first: False
model:
  type: wxformer
  frames: 1
  image_height: 181
  image_width: 360
  levels: 3
  channels: 4
  surface_channels: 2
  input_only_channels: 3
  output_only_channels: 2
  dim: [32, 64, 128, 256]
  depth: [2, 2, 2, 2]
  global_window_size: [8, 4, 2, 1]
  local_window_size: 4
  cross_embed_kernel_sizes: [[4, 8, 16, 32], [2, 4], [2, 4], [2, 4]]
  cross_embed_strides: [2, 2, 2, 2]
  attn_dropout: 0.1
  upsample_with_ps: True
  padding_conf: {activate: True, mode: earth, pad_lat: [37, 38], pad_lon: [76, 76]}
  post_conf:
    activate: True
    tracer_fixer: {activate: True, denorm: True, tracer_name: ['Q', 'rain'], tracer_thres: [1e-8, 0]}
    global_mass_fixer: {activate: True, grid_type: sigma, surface_pressure_name: ['SP'], specific_total_water_name: ['Q']}
    global_water_fixer: {activate: False}
    global_energy_fixer: {activate: True}
loss:
  training_loss: mae
  use_latitude_weights: True
  use_variable_weights: True
  variable_weights: {SP: 2.0, U: 0.5}
trainer:
  type: standard
  mode: fsdp
  train_batch_size: 2
  grad_accum_every: 3
  learning_rate: 1.0e-4
  weight_decay: 3.0e-6
  epochs: 20
  batches_per_epoch: 100
  valid_batches_per_epoch: 5
  stopping_patience: 4
  use_scheduler: True
  scheduler: {scheduler_type: cosine-annealing, T_max: 20}
  amp: True
  grad_max_norm: 2.5
  thread_workers: 4
  something_new: 3
predict:
  forecasts: {type: custom, start_year: 2020, start_month: 1, start_day: 1, start_hours: [0, 12], duration: 3, days: 10}
pbs: {project: NAML0001, nodes: 2, ngpus: 4, walltime: "12:00:00", queue: main, conda: credit, ncpus: 64}
"""


@pytest.fixture
def first(tmp_path, monkeypatch):
    monkeypatch.setenv("USER", "someone")
    path = tmp_path / "first.yml"
    path.write_text(FIRST)
    return path


def loaded(path):
    return load_experiment(path)


def test_the_first_generation(first, tmp_path):
    output = tmp_path / "out" / "my.yml"
    translation = run(first, None, output)
    ours = loaded(output)
    assert ours.save_loc == "/scratch/someone/runs/first"
    assert ours.seed == 7
    assert [(source.type, source.path) for source in ours.data.source] == [
        ("zarr", "/data/ERA5_1deg_6h*"), ("netcdf", "/data/solar_*.nc"), ("netcdf", "/data/static.nc"),
    ]  # fmt: skip
    assert ours.data.levels == (1, 60, 137)
    names = {
        role: [spec.name for group in getattr(ours.data, role) for spec in group[1]]
        for role in ("prognostic", "diagnostic", "dynamic_forcing", "static")
    }
    assert names == {
        "prognostic": ["U", "V", "T", "Q", "SP", "t2m"],
        "diagnostic": ["rain", "evaporation"],
        "dynamic_forcing": ["tsi"],
        "static": ["z", "lsm"],
    }
    # CREDIT's last year is exclusive, its forecast_len counts the steps after the first.
    assert (ours.data.train[0].start, ours.data.train[0].end) == ("1979-01-01T00:00:00", "2013-12-31T18:00:00")
    assert (ours.data.valid[0].start, ours.data.valid[0].end) == ("2014-01-01T00:00:00", "2017-12-31T18:00:00")
    assert (ours.data.test[0].start, ours.data.test[0].end) == ("2020-01-01T00:00:00", "2020-01-13T12:00:00")
    assert ours.data.forecast_len == 4
    assert str(ours.data.timestep) == "6:00:00"
    assert (ours.model.upsample, ours.model.predict, ours.model.position_index) == ("pixel_shuffle", "state", "credit")
    assert ours.model.padding_conf.pad_lat == (37, 38)
    assert (ours.model.attn_dropout, ours.model.ff_dropout, ours.model.drop_path) == (0.1, 0, 0)
    assert (ours.loss.type, ours.loss.scale, ours.loss.variable_weights) == ("mae", "state", {"SP": 2.0, "U": 0.5})
    assert [part.type for part in ours.physics] == ["clip", "clip", "mass"]
    assert (ours.physics[0].variables, ours.physics[0].minimum) == (("Q",), 1e-8)
    trainer = ours.trainer
    assert trainer.parallelism.data == "fsdp2"
    assert (trainer.micro_batch_size, trainer.global_batch_size) == (2, 2 * 4 * 2 * 3)
    assert (trainer.optimizer.learning_rate, trainer.optimizer.weight_decay) == (1e-4, 3e-6)
    assert (trainer.epochs, trainer.batches_per_epoch, trainer.valid_batches) == (20, 100, 5)
    assert (trainer.amp, trainer.grad_max_norm, trainer.scheduler.type) == (True, 2.5, "linear-warmup-cosine")
    assert str(ours.inference.lead) == "10 days, 0:00:00"
    assert str(ours.inference.init.interval) == "12:00:00"
    assert (ours.site.name, ours.pbs.account, ours.pbs.nodes, ours.pbs.ngpus) == ("derecho", "NAML0001", 2, 4)
    assert trainer.early_stopping.patience == 4
    open_ = {remark.key for remark in translation.remarks if not remark.covered}
    assert open_ == {
        "data.mean_path", "data.std_path", "data.one_shot", "model.post_conf.global_mass_fixer",
        "model.post_conf.global_energy_fixer", "trainer.something_new",
    }  # fmt: skip
    lines = FIRST.splitlines()
    assert all(remark.key.rsplit(".", 1)[-1] in lines[remark.line - 1] for remark in translation.remarks)


@pytest.mark.parametrize(
    ("added", "key", "meaning", "covered"),
    [
        ("scaling_coefs: {LHTFL: -1.0, DSWRF: 1.0}", "scaling_coefs", "not translated: set the `units`", False),
        ("unheard_of: {LHTFL: -1.0}", "unheard_of", "not translated: there is no such correction", False),
        ("unheard_of: {activate: False, LHTFL: -1.0}", "unheard_of", "not active", True),
        (
            "global_energy_fixer_updown: {grid_type: sigma}",
            "global_energy_fixer_updown",
            "left out: it has no `activate`",
            False,
        ),
    ],
)
def test_a_part_of_the_corrections_is_inactive_only_where_it_says_so(first, tmp_path, added, key, meaning, covered):
    line = "    global_water_fixer: {activate: False}\n"
    text = first.read_text()
    assert line in text
    first.write_text(text.replace(line, f"{line}    {added}\n"))
    remarks = {remark.key: remark for remark in run(first, None, tmp_path / "my.yml").remarks}
    remark = remarks[f"model.post_conf.{key}"]
    assert (remark.meaning[: len(meaning)], remark.covered) == (meaning, covered)
    assert remarks["model.post_conf.global_water_fixer"].covered


SECOND = """
save_loc: runs/second
data:
  source:
    CAM:
      levels: [1, 2, 3]
      level_coord: lev
      variables:
        prognostic: {vars_3D: [T, U, V, Qtot], vars_2D: [PS, TREFHT], path: "/data/cam_%Y.zarr", filename_time_format: "%Y"}
        diagnostic: {vars_2D: [PRECT, QFLX, UP, OLR, SD, SU, LD, LU, SH, LH]}
        dynamic_forcing: {vars_2D: [SOLIN]}
        static: {vars_2D: [PHIS]}
    OCEAN:
      levels: [1, 2]
      variables:
        prognostic: {vars_3D: [SALT], vars_2D: [SSH], path: /data/ocean.zarr}
        diagnostic: {vars_2D: [HFLX]}
        dynamic_forcing: null
        static: {vars_2D: [DEPTH]}
  start_datetime: "1980-01-01"
  end_datetime: "1999-12-31T18:00:00"
  timestep: 3h
  forecast_len: 2
validation_data: {start_datetime: "2000-01-01", end_datetime: "2001-12-31", forecast_len: 1}
preblocks:
  ic_only:
    grid: {type: regrid}
  per_step:
    log: {type: log_transform, args: {variables: [CAM/diagnostic/2d/PRECT, CAM/dynamic_forcing], base: "10", eps: 1.0e-5}}
    root: {type: sqrt_transform, args: {variables: [CAM/prognostic/3d/U]}}
    concat: {type: concat}
postblocks:
  per_step:
    exp: {type: exp_transform, args: {variables: [CAM/diagnostic/2d/PRECT], base: "10", eps: 1.0e-5}}
    tracer: {type: tracer_fixer, args: {tracer_vars: [CAM/prognostic/3d/Qtot, CAM/diagnostic/2d/PRECT], tracer_thres: 1.0e-9,
      tracer_thres_max: [0.1, null]}}
    mass: {type: global_mass_fixer, args: {q_var: CAM/prognostic/3d/Qtot, sp_var: CAM/prognostic/2d/PS,
      save_loc_physics: LEVELS, lon_lat_level_name: [lon, lat, hyai, hybi], midpoint: true}}
    water: {type: global_water_fixer, args: {q_var: CAM/prognostic/3d/Qtot, sp_var: CAM/prognostic/2d/PS,
      precip_var: CAM/diagnostic/2d/PRECT, evapor_var: CAM/diagnostic/2d/QFLX, lead_time_periods: 3, grid_type: pressure}}
    energy: {type: global_energy_fixer_updown, args: {T_var: CAM/prognostic/3d/T, q_var: CAM/prognostic/3d/Qtot,
      U_var: CAM/prognostic/3d/U, V_var: CAM/prognostic/3d/V, sp_var: CAM/prognostic/2d/PS, surface_geopotential_name: PHIS,
        toa_down_solar_input_var: CAM/dynamic_forcing/2d/SOLIN, toa_up_solar_var: CAM/diagnostic/2d/UP,
          toa_up_olr_var: CAM/diagnostic/2d/OLR, surf_down_solar_var: CAM/diagnostic/2d/SD,
            surf_up_solar_var: CAM/diagnostic/2d/SU, surf_down_lw_var: CAM/diagnostic/2d/LD,
              surf_up_lw_var: CAM/diagnostic/2d/LU, surf_sh_var: CAM/diagnostic/2d/SH, surf_lh_var: CAM/diagnostic/2d/LH,
                grid_type: pressure}}
    pressure: {type: pressure_interp_diagnostic, args: {pressure_levels: [500.0], level_info_file: LEVELS}}
    twin: {type: mslp_diagnostic, args: {key: y_target_processed}}
    filter: {type: wind_artifact_filter}
model: {type: wxformer, image_height: 96, image_width: 176, levels: 3, dim: [32, 64, 128, 256], depth: [1, 1, 2, 1],
  global_window_size: [4, 4, 2, 1], local_window_size: 4, cross_embed_strides: [2, 2, 2, 2], upsample_with_ps: True,
    padding_conf: {activate: True, mode: earth, pad_lat: [16, 16], pad_lon: [8, 8]}}
loss:
  type: base
  args: {training_loss: huber, base_loss_parameters: {delta: 2.0}, var_weighting: learnable,
    variable_weights: {CAM/prognostic/3d/T: [1.0, 2.0, 3.0]}, use_latitude_weights: true}
trainer:
  type: gen2
  parallelism: {data: fsdp2, tensor: 2, domain: 2}
  train_batch_size: 2
  epochs: 20
  stopping_patience: 5
  scheduler: {scheduler_type: cosine-annealing, T_max: 40, eta_min: 1.0e-6}
  batches_per_epoch: 50
inference:
  run_mode: single
  single_forecast: {forecast_length: 2m, start_datetime: "2002-01-01T00:00Z"}
  output: {format: netcdf, output_interval: 24h, variables: [{name: T, levels: [1, 3]}, {name: PS}], encoding: {dtype: float32,
    zlib: true, complevel: 3}}
slurm: {account: m1, constraint: gpu, qos: regular, nodes: 2, ngpus: 4, modules: [nccl], conda: credit}
"""


def second_document(folder):
    """Write SECOND, with coefficients of its levels."""
    a, b = [0.0, 2e4, 3e4, 0.0], [0.0, 0.1, 0.4, 1.0]
    netcdf_files.save(xr.Dataset({"hyai": ("i", a), "hybi": ("i", b), "P0": ((), 1.0)}), folder / "levels.nc")
    path = folder / "second.yml"
    path.write_text(SECOND.replace("LEVELS", str(folder / "levels.nc")))
    return path


def test_several_periods_of_the_second_generation(tmp_path):
    path = second_document(tmp_path)
    text = path.read_text()
    one = '  start_datetime: "1980-01-01"\n  end_datetime: "1999-12-31T18:00:00"\n'
    assert one in text
    several = '  date_ranges: [["1990-01-01", "1999-12-31T18:00:00"], ["1980-01-01", "1984-12-31T18:00:00"]]\n'
    path.write_text(text.replace(one, several))
    run(path, None, tmp_path / "my.yml")
    periods = [(str(period.start), str(period.end)) for period in loaded(tmp_path / "my.yml").data.train]
    assert [(start[:10], end[:10]) for start, end in periods] == [
        ("1980-01-01", "1984-12-31"),
        ("1990-01-01", "1999-12-31"),
    ]


def test_the_second_generation(tmp_path):
    translation = run(second_document(tmp_path), None, tmp_path / "my.yml")
    ours = loaded(tmp_path / "my.yml")
    assert len((tmp_path / "my.yml").read_text().splitlines()) <= 60
    assert [v.levels for v in ours.data.prognostic.level] == [None, None, None, None, (1, 2)]
    transform = ours.data.diagnostic.surface[0].transform
    assert (transform.type, transform.scale) == ("log1p", 1e-5)
    assert [(part.type, getattr(part, "minimum", None), getattr(part, "maximum", None)) for part in ours.physics] == [
        ("clip", 1e-9, 0.1), ("clip", 1e-9, None), ("mass", None, None), ("moisture", None, None), ("energy", None, None),
    ]  # fmt: skip
    assert (ours.physics[2].a, ours.physics[2].b) == ((0.0, 2e4, 3e4, 0.0), (0.0, 0.1, 0.4, 1.0))
    assert (ours.physics[4].top.down, ours.physics[4].surface.up) == (("SOLIN",), ("SU", "LU"))
    derive = ours.inference.derive
    assert (derive.pressure_levels, derive.model_levels, derive.conventions) == (
        (500,),
        str(tmp_path / "levels.nc"),
        "credit",
    )
    assert (ours.loss.type, ours.loss.delta, ours.loss.variable_weights) == ("huber", 2.0, {"T": (1.0, 2.0, 3.0)})
    assert (ours.trainer.global_batch_size, ours.trainer.micro_batch_size) == (4, 2)
    assert (ours.trainer.early_stopping.patience, ours.trainer.grad_max_norm) == (5, None)
    assert (ours.trainer.scheduler.total_steps, ours.trainer.scheduler.min_lr) == (2000, 1e-6)
    output = ours.inference.output
    assert (output.variables, output.levels, output.compression) == (("T", "PS"), (1.0, 3.0), 3)
    assert (ours.data.train[0].end, str(ours.inference.lead)) == ("1999-12-31T18:00:00", "60 days, 0:00:00")
    assert (ours.site.name, ours.pbs.account, ours.pbs.queue) == ("perlmutter", "m1", "regular")
    assert ours.pbs.setup == ("module load nccl", "conda activate credit")
    open_ = {remark.key for remark in translation.remarks if not remark.covered}
    assert open_ == {
        "validation_data.forecast_len", "preblocks.ic_only.grid", "preblocks.per_step.log", "preblocks.per_step.root",
        "postblocks.per_step.energy", "postblocks.per_step.filter", "loss.args.var_weighting", "inference.output.output_interval",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("theirs", "ours", "rate"),
    [
        ({"scheduler_type": "linear-warmup-cosine"},
         {"type": "linear-warmup-cosine", "warmup_steps": 1000, "min_lr": 1e-5, "total_steps": 500_000}, 1e-4),
        ({"scheduler_type": "lambda"}, {"type": "linear-warmup-cosine", "warmup_steps": 1000, "total_steps": 10_000}, 1e-4),
        ({"scheduler_type": "plateau", "patience": 4, "min_lr": 1e-7},
         {"type": "plateau", "factor": 0.1, "patience": 5, "min_change": 1e-4, "min_lr": 1e-7}, 1e-4),
        ({"scheduler_type": "cosine-annealing", "T_max": 30, "eta_min": 1e-6},
         {"type": "linear-warmup-cosine", "min_lr": 1e-6, "total_steps": 3000}, 1e-4),
        ({"scheduler_type": "cosine-annealing-restarts", "first_cycle_steps": 250, "warmup_steps": 50, "cycle_mult": 2.0,
          "max_lr": 1e-3, "min_lr": 1e-6},
         {"type": "cosine-restarts", "warmup_steps": 50, "period": 200, "factor": 2, "min_lr": 1e-6}, 1e-3),
        ({"scheduler_type": "plateau", "min_lr": 1e-2},
         {"type": "plateau", "factor": 0.1, "patience": 11, "min_change": 1e-4, "min_lr": 1e-4}, 1e-4),
        ({"scheduler_type": "unheard-of"}, {"type": "constant"}, 1e-4),
    ],
)  # fmt: skip
def test_schedules(first, theirs, ours, rate):
    values = yaml.safe_load(FIRST)
    values["trainer"]["scheduler"] = theirs
    first.write_text(yaml.safe_dump(values))
    trainer = translate(first).experiment["trainer"]
    assert (trainer["scheduler"], trainer["optimizer"]["learning_rate"]) == (ours, rate)


def test_members_of_credits_ensembles(first, tmp_path):
    values = yaml.safe_load(FIRST)
    values["trainer"] |= {"type": "era5-ensemble", "ensemble_size": 4}
    values["loss"] |= {"training_loss": "KCRPS"}
    values["model"] |= {"type": "crossformer-ensemble", "noise_latent_dim": 128, "encoder_noise": True, "freeze": False}
    first.write_text(yaml.safe_dump(values))
    translation = run(first, None, tmp_path / "my.yml")
    assert {"model.type", "model.noise_latent_dim", "model.encoder_noise", "model.freeze"} <= {
        remark.key for remark in translation.remarks
    }
    ours = loaded(tmp_path / "my.yml")
    assert (ours.loss.type, ours.loss.alpha, ours.trainer.members, ours.model.noise.type) == ("crps", 1.0, 4, "decoder")
    assert "trainer.ensemble_size" in {remark.key for remark in translation.remarks if not remark.covered}


def test_a_score_of_one_member_is_its_absolute_error(first, tmp_path):
    values = yaml.safe_load(FIRST)
    values["loss"] |= {"training_loss": "KCRPS"}
    first.write_text(yaml.safe_dump(values))
    translation = run(first, None, tmp_path / "my.yml")
    assert (loaded(tmp_path / "my.yml").loss.type, loaded(tmp_path / "my.yml").trainer.members) == ("mae", 1)
    assert "loss.training_loss" in {remark.key for remark in translation.remarks}


@pytest.mark.parametrize("kind", ["fuxi", "MyModel"])
def test_in_place_of_another_architecture_stands_a_model_that_fits_the_grid(first, tmp_path, kind):
    values = yaml.safe_load(FIRST)
    values["model"] |= {"type": kind, "window_size": 7, "dim": 1024}
    first.write_text(yaml.safe_dump(values))
    translation = run(first, None, tmp_path / "my.yml")
    model = loaded(tmp_path / "my.yml").model
    assert model.check(181, 360) == []
    assert model.dim == wxformer.Config().dim
    listed = {remark.key for remark in translation.remarks}
    assert {
        f"model.{key}" for key in values["model"] if key not in ("post_conf", "image_height", "image_width")
    } <= listed
    with pytest.raises(UserError, match=r"model\.type: expected one of"):
        translate(first, "transpose", (tmp_path / "w.pt", tmp_path / "w.safetensors"))


def test_long_experiments_have_at_most_60_lines(first, tmp_path):
    """With every section, and weights of variables and setup too long for a line each."""
    values = yaml.safe_load(FIRST)
    values["data"] |= {"history_len": 2, "level_ids": list(range(1, 138))}
    values["model"] |= {"frames": 2, "levels": 137, "attn_dropout": 0.1, "ff_dropout": 0.2, "use_spectral_norm": False}
    values["loss"] |= {
        "variable_weights": {name: [i / 9 for i in range(137)] for name in "UVTQ"},
        "training_loss": "huber",
    }
    values["loss"] |= {"training_loss_parameters": {"delta": 2.0}, "use_latitude_weights": False}
    values["trainer"] |= {
        "use_ema": True,
        "ema_decay": 0.99,
        "activation_checkpoint": True,
        "cpu_offload": True,
        "compile": True,
    }
    values["predict"] |= {"batch_size": 2, "save_vars": ["U", "V"]}
    values["pbs"] |= {"modules": [f"module/{i}" for i in range(9)], "queue": "somewhere", "mem": "80GB"}
    first.write_text(yaml.safe_dump(values))
    translation = run(first, None, tmp_path / "my.yml")
    assert sum(len(part) if isinstance(part, dict) else 1 for part in translation.experiment.values()) > 60
    assert len((tmp_path / "my.yml").read_text().splitlines()) <= 60
    assert loaded(tmp_path / "my.yml").loss.variable_weights["U"][1] == 1 / 9


ODD = """
common: &common
  train_batch_size: 3
  weight_decay: 1.0e-4
trainer:
  <<: *common
  weight_decay: 1.0e-2
  epochs: 4
  epochs: 5
  something_new: 1
predict:
  2020: never heard of
"""


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_anchors_repeated_keys_and_line_ends(first, newline):
    """Lines are those of the file, wherever a value comes from; nothing is lost in what YAML merges or overwrites."""
    before = FIRST[: FIRST.index("trainer:")]
    first.write_bytes(b"\xef\xbb\xbf" + (before + ODD.lstrip()).replace("\n", newline).encode())
    translation = translate(first)
    trainer = translation.experiment["trainer"]
    assert (trainer["micro_batch_size"], trainer["epochs"], trainer["optimizer"]["weight_decay"]) == (3, 5, 0.01)
    lines = (before + ODD.lstrip()).splitlines()
    at = {remark.key: lines[remark.line - 1].strip() for remark in translation.remarks}
    assert at["trainer.epochs"] == "epochs: 4"
    assert at["trainer.something_new"] == "something_new: 1"
    assert at["predict.2020"] == "2020: never heard of"
    assert at["common.weight_decay"] == "weight_decay: 1.0e-4"


def leaves(values, keys=()):
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from leaves(value, (*keys, key))
    else:
        yield keys


def others(value):
    """Return other values of the kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2, value + 1, value / 2]
    if isinstance(value, list):
        return [value[:-1], value[::-1], [*value, value[-1]]]
    return [f"{value}x", str(value).replace("1", "2"), "mae", "12h", 5, ["abc"]]


SAYS_NOTHING_ELSE = {
    "model.image_height", "model.image_width", "model.levels",  # of the data
    "data.one_shot", "data.history_len", "loss.type", "inference.run_mode", "slurm.constraint",
    "trainer.use_scheduler", "trainer.scheduler.last_epoch",
}  # fmt: skip


@pytest.mark.parametrize("generation", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_key_is_translated_or_listed(generation, first, tmp_path):
    """Each key is changed in turn: the translation differs, or the key or a part that it is in is listed."""
    path = first if generation == 1 else second_document(tmp_path)
    document = yaml.safe_load(path.read_text())

    def translated():
        found = translate(path)
        return written(found.experiment, path), {(r.key, r.value, r.meaning) for r in found.remarks}

    same = translated()
    listed = {key for key, _, _ in same[1]}
    for keys in leaves(document):
        name = ".".join(map(str, keys))
        if name in SAYS_NOTHING_ELSE or any(name == key or name.startswith(f"{key}.") for key in listed):
            continue
        noticed = False
        for i in range(6):
            changed = copy.deepcopy(document)
            inside = changed
            for key in keys[:-1]:
                inside = inside[key]
            inside[keys[-1]] = (others(inside[keys[-1]]) * 6)[i]
            path.write_text(yaml.dump(changed, Dumper=yaml.CSafeDumper))
            try:
                noticed = noticed or translated() != same
            except UserError:
                noticed = True
            if noticed:
                break
        assert noticed, name


def test_a_key_that_means_nothing_here_is_listed_wherever_it_is(first):
    """A key is added to every section in turn; it is never passed over."""
    document = yaml.safe_load(FIRST)
    sections = [(), *((name,) for name, value in document.items() if isinstance(value, dict))]
    for keys in (*sections, ("model", "post_conf"), ("predict", "forecasts"), ("trainer", "scheduler")):
        changed = yaml.safe_load(FIRST)
        inside = changed
        for key in keys:
            inside = inside[key]
        inside["never_heard_of"] = {"activate": True} if keys == ("model", "post_conf") else 1
        first.write_text(yaml.safe_dump(changed))
        said = " ".join(remark.key for remark in translate(first).remarks)
        assert "never_heard_of" in said, keys


def test_what_has_been_read_is_not_listed():
    document = Document({"a": {"b": 1, "c": {"d": None}}, "e": []}, {})
    assert list(document.rest()) == [("a", "b"), ("a", "c", "d"), ("e",)]
    assert document.get("a", "b") == 1
    assert document.get("a", "c", "d", default=5) == 5
    assert document.get("a", "x", default=6) == 6
    assert list(document.rest()) == [("e",)]
    document.remark(("e",), "nothing")
    assert not list(document.rest())
    assert document.remarks[0].key == "e"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: [1", "cannot be read"),
        ("data:\n\tvariables: [U]", "cannot be read"),
        ("data: &d {variables: *d}", "contains itself"),
        ("data: !include other.yml", "cannot be read"),
        ("model: {}", "with a `data` section"),
        ("data: {train_years: [1979, 2000]}", "expected paths"),
        ("data: {save_loc: /data/x.zarr, variables: [U]}", "training period"),
        ("data: {save_loc: /data/x.zarr, variables: [U], train_years: [a, b]}", "values of another kind"),
        ("data: {source: {a: 1}}", "values of another kind"),
        ("data: {save_loc: /x.zarr, variables: [U], train_years: [1979, 2000]}", "expected a `model` section"),
        (
            "data: {save_loc: /x.zarr, variables: [U], train_years: [1979, 2000]}\nmodel: {type: fuxi}",
            "with image_height and image_width",
        ),
    ],
)
def test_what_is_no_experiment_is_one_message_and_nothing_is_written(tmp_path, text, words, capsys):
    path = tmp_path / "theirs.yml"
    path.write_text(text)
    with pytest.raises(SystemExit) as end:
        cli.main(["import-credit", str(path), "-o", str(tmp_path / "mine.yml")])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert [child.name for child in tmp_path.iterdir()] == ["theirs.yml"]


def test_nothing_is_overwritten(first, tmp_path):
    (tmp_path / "mine.yml").write_text("mine")
    with pytest.raises(UserError, match="--output: expected a path where nothing is"):
        run(first, None, tmp_path / "mine.yml")
    assert (tmp_path / "mine.yml").read_text() == "mine"


def test_a_public_store_without_its_package_is_one_message(tmp_path, capsys, monkeypatch):
    # The package would ask Google, and its threads would stay in this process.
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    path = tmp_path / "public.yml"
    text = written(translate(_with_source(tmp_path)).experiment, path)
    path.write_text(text)
    with pytest.raises(SystemExit) as end:
        cli.main(["check", str(path)])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "pip install 'credit-like[cloud]'" in said
    assert "Traceback" not in said


def _with_source(folder):
    path = folder / "theirs.yml"
    groups = "{prognostic: {vars_3D: [temperature], vars_2D: [surface_pressure]}}"
    path.write_text(
        "save_loc: runs/x\n"
        "data:\n"
        "  source:\n"
        f"    WB: {{dataset_type: weatherbench2_era5, resolution: 240x121, levels: [500], variables: {groups}}}\n"
        "  start_datetime: 1990-01-01\n"
        "  end_datetime: 1999-12-31\n"
        "  timestep: 6h\n"
    )
    return path


PARITY = Path(os.environ.get("CREDIT_LIKE_PARITY", "absent"))


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (
            {"type": "sqrt_transform", "args": {"variables": ["A/prognostic/3d/U"]}},
            "U (numbers after `sqrt_transform`)",
        ),
        ({"type": "log_transform", "args": {"variables": ["A/prognostic/2d"]}}, "SP (numbers after `log_transform`)"),
        (None, None),
    ],
    ids=["root", "logarithm", "none"],
)
def test_numbers_of_files_after_another_transform_are_not_taken_over(tmp_path, step, told):
    """They are the mean and standard deviation of what the transform makes, not of the variable."""
    netcdf_files.save(
        xr.Dataset({"U": ("level", [1.0, 2.0]), "SP": ((), 3.0)}, {"level": [10, 20]}), tmp_path / "mean.nc"
    )
    netcdf_files.save(
        xr.Dataset({"U": ("level", [4.0, 5.0]), "SP": ((), 6.0)}, {"level": [10, 20]}), tmp_path / "std.nc"
    )
    files = {"mean_path": str(tmp_path / "mean.nc"), "std_path": str(tmp_path / "std.nc")}
    roles = {"prognostic": {"vars_3D": ["U"], "vars_2D": ["SP"]}}
    steps = {**({"first": step} if step else {}), "norm": {"type": "era5_normalizer", "args": files}}
    values = {"data": {"source": {"A": {"levels": [10, 20], "variables": roles}}}, "preblocks": {"per_step": steps}}
    data = {
        "source": {"type": "synthetic"}, "timestep": "6h", "levels": [10, 20],
        "prognostic": {"level": ["U"], "surface": ["SP"]},
        "train": ["2000-01-01", "2000-02-01"], "valid": ["2000-03-01", "2000-03-02"], "test": ["2000-04-01", "2000-04-02"],
    }  # fmt: skip
    document = Document(values, {})
    found = blocks.of_weights(document, data, None, {})
    remarks = {remark.meaning for remark in document.remarks if remark.key.endswith(("mean_path", "std_path"))}
    if told is None:
        assert found["normalisation"]["prognostic"]["mean"] == [1.0, 2.0, 3.0]
        assert remarks == {"its numbers go with the weights"}
    else:
        assert "normalisation" not in found
        assert remarks == {f"not taken over: {told}. A run from these weights fits its own statistics"}


@pytest.mark.skipif(not PARITY.is_dir(), reason="CREDIT_LIKE_PARITY unset: no recordings of CREDIT")
@pytest.mark.parametrize(("generation", "static_first"), [(1, True), (1, False), (2, True)])
def test_a_run_that_starts_from_translated_weights_gives_credits_numbers(tmp_path, generation, static_first):
    """Channels go by name from CREDIT's order into ours, and the normalisation is that of CREDIT's files."""
    values = yaml.safe_load(FIRST) | {"save_loc": str(tmp_path / "run")}
    values["model"] = {"type": "crossformer", **json.loads((PARITY / "pixelshuffle.json").read_text())}
    values["data"] |= {
        "variables": ["U", "V"], "level_ids": [10, 20, 30], "surface_variables": ["SP", "t2m", "q2m"],
        "diagnostic_variables": ["rain"], "static_variables": ["z"], "static_first": static_first, "history_len": 2,
        "mean_path": str(tmp_path / "mean.nc"), "std_path": str(tmp_path / "std.nc"),
    }  # fmt: skip
    # As in CREDIT's own files: keys that its network ignores, and a correction after it, which becomes one of `physics`.
    values["model"] |= {"frame_patch_size": 1, "attention_type": None}
    values["model"]["post_conf"] = {
        "activate": True, "tracer_fixer": {"activate": True, "tracer_name": ["rain"], "tracer_thres": [0]}
    }  # fmt: skip
    if generation == 2:
        old = values["data"]
        roles = {
            "dynamic_forcing": {"vars_2D": ["tsi"]}, "diagnostic": {"vars_2D": ["rain"]}, "static": {"vars_2D": ["z"]},
            "prognostic": {"vars_3D": old["variables"], "vars_2D": old["surface_variables"], "path": "/data/x.zarr"},
        }  # fmt: skip
        files = {"mean_path": old["mean_path"], "std_path": old["std_path"]}
        values |= {
            "data": {
                "source": {"A": {"levels": old["level_ids"], "variables": roles}}, "history_len": 2, "timestep": "6h",
                "start_datetime": "1979-01-01", "end_datetime": "2000-12-31",
            },
            "preblocks": {"per_step": {"norm": {"type": "era5_normalizer", "args": files}}}, "loss": {},
        }  # fmt: skip
    (tmp_path / "theirs.yml").write_text(yaml.safe_dump(values))
    surface = ("SP", "t2m", "q2m", "rain", "tsi")
    # The file has more levels than the model.
    mean = {"U": ("level", [0.0, 10.0, 20.0, 30.0]), "V": ("level", [1.0, 11.0, 21.0, 31.0])}
    mean |= {name: ((), 100.0 + i) for i, name in enumerate(surface)}
    mean = xr.Dataset(mean, {"level": [5, 10, 20, 30]})
    netcdf_files.save(mean, tmp_path / "mean.nc")
    netcdf_files.save(mean * 2 + 1, tmp_path / "std.nc")
    translation = run(tmp_path / "theirs.yml", PARITY / "pixelshuffle_checkpoint.pt", tmp_path / "my.yml")
    assert not [r for r in translation.remarks if r.key.endswith(("mean_path", "std_path")) and not r.covered]
    ours = loaded(tmp_path / "my.yml")
    assert [part.type for part in ours.physics] == ["clip"]
    variables = Variables(ours.data)
    source = transfer.Source.open(ours.start_from)
    model = wxformer.build(
        ours.model,
        in_channels=variables.in_channels,
        out_channels=variables.out_channels,
        frames=2,
        height=48,
        width=96,
    ).eval()
    channels = transfer.Channels.of(variables, 2, ours.model.predict)
    plan = transfer.plan(source, model, ours.model, channels, "error")
    # Ours has static channels before forcing; that is the only difference that a file may have.
    assert plan.notes == ([] if static_first else [f"inputs of the source: {', '.join(channels.inputs)}"])
    transfer.load(source, plan, model, 0)
    spectral_norm.refresh(model)
    recorded = torch.load(PARITY / "pixelshuffle_io.pt", weights_only=True)
    x, y = recorded["x"], recorded["y"]
    theirs = ["U@10", "U@20", "U@30", "V@10", "V@20", "V@30", "SP", "t2m", "q2m"]
    theirs += ["z", "tsi"] if static_first else ["tsi", "z"]
    with torch.no_grad():
        found = model(torch.stack([x[:, theirs.index(name)] for name in channels.inputs], 1))
    torch.testing.assert_close(found, y, rtol=0, atol=1e-5 * float(y.abs().max()))

    names = list(dict.fromkeys([*channels.inputs, *channels.outputs]))
    fitted = {name: ("channel", np.full(len(names), 7.0)) for name in ("mean", "std", "change_std")}
    adopted, _ = transfer.adopt(Statistics(xr.Dataset(fitted, {"channel": names})), source)
    found = {
        name: [float(adopted.dataset[k].sel(channel=name)) for k in ("mean", "std", "change_std")] for name in names
    }
    assert found["U@20"] == [20.0, 41.0, 7.0]
    assert found["V@10"] == [11.0, 23.0, 7.0]
    assert found["rain"] == [103.0, 207.0, 7.0]
    assert found["tsi"] == [104.0, 209.0, 7.0]
    assert found["z"] == [0.0, 1.0, 7.0]


def test_the_order_of_channels_is_that_of_credit_itself():
    """Where the package miles-credit is installed; elsewhere the order is the one of the tests above."""
    schema = pytest.importorskip("credit.datasets.gen_2.channel_utils", reason="pip install miles-credit")
    values = yaml.safe_load(SECOND)
    theirs = schema.ChannelSchema.from_config(values)
    keys = blocks.variable_keys(Document(values, {}))
    assert [key for key in keys.values() if "/diagnostic/" not in key] == list(theirs.input_channel_map())
    predicted = [key for key in keys.values() if key.split("/")[1] in ("prognostic", "diagnostic")]
    assert predicted == list(theirs.target_channel_map())


@pytest.mark.skipif(not PARITY.is_dir(), reason="CREDIT_LIKE_PARITY unset: no recordings of CREDIT")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model.depth": [1, 1, 1, 1]}, r"(?s)do not fit the model.*and \d+ more, such as"),
        ({"data.surface_variables": ["SP"]}, "expected data with the 11 channels of input of the weights, got 9"),
        ({"data.mean_path": "junk.nc"}, "which cannot be read"),
        ({"data.mean_path": "short.nc"}, "number of U on each of 3 levels"),
        ({"data.std_path": "zero.nc"}, "standard deviations above 0"),
        ({"data.std_path": "nan.nc"}, "expected finite numbers"),
        ({"data.mean_path": "other.nc"}, "expected U, got u"),
    ],
)
def test_what_does_not_belong_to_the_weights_is_one_message_and_nothing_is_written(tmp_path, changed, message):
    values = yaml.safe_load(FIRST)
    values["model"] = {"type": "crossformer", **json.loads((PARITY / "pixelshuffle.json").read_text())}
    values["model"].pop("post_conf", None)
    numbers = {name: ("level", [1.0, 2.0, 3.0]) for name in "UV"}
    numbers = xr.Dataset(numbers | dict.fromkeys(("SP", "t2m", "q2m", "rain", "tsi"), ((), 1.0)))
    made = {"good": numbers, "short": numbers.isel(level=[0]), "zero": numbers * 0.0, "nan": numbers * np.nan}
    for name, dataset in (made | {"other": numbers.rename(U="u")}).items():
        netcdf_files.save(dataset, tmp_path / f"{name}.nc")
    (tmp_path / "junk.nc").write_bytes(b"junk" * 100)
    values["data"] |= {
        "variables": ["U", "V"], "level_ids": [10, 20, 30], "surface_variables": ["SP", "t2m", "q2m"], "history_len": 2,
        "diagnostic_variables": ["rain"], "static_variables": ["z"], "mean_path": "good.nc", "std_path": "good.nc",
    }  # fmt: skip
    for key, value in changed.items():
        section, name = key.split(".")
        values[section][name] = value
    for name in ("mean_path", "std_path"):
        values["data"][name] = str(tmp_path / values["data"][name])
    (tmp_path / "theirs.yml").write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match=message):
        run(tmp_path / "theirs.yml", PARITY / "pixelshuffle_checkpoint.pt", tmp_path / "out" / "my.yml")
    assert not (tmp_path / "out").exists()


SECOND_WEIGHTS = """
data:
  source:
    ERA5:
      levels: [500, 850]
      variables:
        prognostic: {vars_3D: [temperature, u], vars_2D: [sp], path: /data/era5.zarr}
        dynamic_forcing: {vars_2D: [sst], path: /data/era5.zarr}
        static: {vars_2D: [lsm], path: /data/era5.zarr}
        diagnostic: {vars_2D: [rain], path: /data/era5.zarr}
    SUN:
      dataset_type: tisr
      variables:
        dynamic_forcing: {vars_2D: [tisr]}
  start_datetime: "1979-01-01"
  end_datetime: "2017-12-31 18:00:00"
  timestep: 6h
preblocks:
  per_step:
    scaler:
      type: bridgescaler_transform
      args: {scaler_path: SCALERS, variables: []}
    concat: {type: concat}
model: {type: wxformer, image_height: 48, image_width: 96, levels: 2, channels: 2}
"""


def packed(values):
    """Return an array as bridgescaler encodes it."""
    array = np.asarray(values, np.float32)
    return {"__numpy__": b64encode(array.tobytes()).decode(), "dtype": array.dtype.str, "shape": list(array.shape)}


def standard(mean, var):
    return {"type": "DStandardScalerTensor", "mean_x_": packed(mean), "var_x_": packed(var), "channels_last": False}


def second_generation(folder, log=(), **changed):
    """Write an experiment of the second generation with its scaler file, and return (document, data) for its weights."""
    scalers = {
        "prognostic/3d/temperature": standard([250, 280], [4, 9]), "prognostic/3d/u": standard([1, 2], [16, 25]),
        "prognostic/2d/sp": {"type": "DMinMaxScaler", "min_x_": [9e4], "max_x_": [1e5]},
        "dynamic_forcing/2d/sst": {"type": "DStandardScaler", "mean_x_": {"object": "ndarray", "dtype": "<f8",
            "shape": [1], "data": [290.0]}, "var_x_": [100.0]},
    }  # fmt: skip
    stored = {f"ERA5/{key}": json.dumps(value) for key, value in (scalers | changed).items()}
    target = {
        "ERA5/diagnostic/2d/rain": json.dumps(standard([3], [1])),
        "ERA5/prognostic/3d/u": json.dumps(standard([0], [0])),
    }
    (folder / "scalers.json").write_text(json.dumps({"input": {"ERA5": stored}, "target": {"ERA5": target}}))
    text = SECOND_WEIGHTS.replace("SCALERS", str(folder / "scalers.json"))
    if log:
        text = text.replace(
            "  per_step:\n", f"  per_step:\n    log: {{type: log_transform, args: {{variables: {list(log)}}}}}\n"
        )
    (folder / "theirs.yml").write_text(text)
    return translate(folder / "theirs.yml", "transpose", (folder / "theirs.pt", folder / "weights.safetensors"))


def test_credits_record_of_the_channels_goes_before_our_knowledge(tmp_path):
    order = [
        "static/2d/lsm",
        "prognostic/3d/temperature",
        "prognostic/3d/u",
        "prognostic/2d/sp",
        "dynamic_forcing/2d/sst",
    ]
    record = {
        "input": [{"var_key": f"ERA5/{key}"} for key in order] + [{"var_key": "SUN/dynamic_forcing/2d/tisr"}],
        "target": [{"var_key": f"ERA5/{key}"} for key in (*order[1:4], "diagnostic/2d/rain")],
    }
    (tmp_path / "channel_schema.yaml").write_text(yaml.safe_dump(record))
    translation = second_generation(tmp_path)
    assert translation.metadata["channels"]["inputs"][:2] == ["lsm", "temperature@500"]
    assert not [remark for remark in translation.remarks if remark.key == "channel_schema.yaml"]
    record["input"].pop()
    (tmp_path / "channel_schema.yaml").write_text(yaml.safe_dump(record))
    with pytest.raises(UserError, match="differs in tisr; give the experiment of these weights"):
        second_generation(tmp_path)
    (tmp_path / "channel_schema.yaml").write_text("[]")
    with pytest.raises(UserError, match="expected CREDIT's record of channels"):
        second_generation(tmp_path)


def test_numbers_of_logarithms_go_with_the_weights(tmp_path):
    """CREDIT's log(x + ε) − log ε is log1p of x / ε, and its numbers are those of our transform."""
    translation = second_generation(tmp_path, ["ERA5/diagnostic/2d/rain"])
    about = translation.metadata["normalisation"]["diagnostic"]
    assert about == {
        "channels": ["rain"], "mean": [3.0], "std": [1.0], "change_std": [None], "transform": ["log1p of x / 1e-08"]
    }  # fmt: skip
    assert translation.metadata["channels"]["outputs"][-1] == "rain as log1p of x / 1e-08"
    spec = DataSection.model_validate(translation.experiment["data"]).diagnostic.surface[0]
    x = np.array([0.0, 1e-9, 0.02])
    expected = np.log(x + 1e-8) - np.log(1e-8)
    np.testing.assert_allclose(transforms.forward(spec.transform, x, np), expected, rtol=0, atol=1e-12)


def _line_of(text, path):
    return 1 + next(i for i, line in enumerate(path.read_text().splitlines()) if text in line)


def test_scalers_of_the_second_generation_go_with_the_weights(tmp_path):
    translation = second_generation(tmp_path)
    channels, normalisation = translation.metadata["channels"], translation.metadata["normalisation"]
    levels = ["temperature@500", "temperature@850", "u@500", "u@850"]
    # One source after the other; of each, prognostic, static, forcing.
    assert channels == {"inputs": [*levels, "sp", "lsm", "sst", "tisr"], "outputs": [*levels, "sp", "rain"]}
    assert normalisation["prognostic"] == {
        "channels": [*levels, "sp"], "mean": [250.0, 280.0, 1.0, 2.0, 9e4], "std": [2.0, 3.0, 4.0, 5.0, 1e4],
        "change_std": [None] * 5,
    }  # fmt: skip
    assert normalisation["dynamic_forcing"]["channels"] == ["sst", "tisr"]
    assert normalisation["dynamic_forcing"]["mean"] == [290.0, 0.0]  # what no scaler has is not scaled
    assert normalisation["dynamic_forcing"]["std"] == [10.0, 1.0]
    assert normalisation["diagnostic"]["mean"] == [3.0]
    (remark,) = [remark for remark in translation.remarks if "scaler" in remark.key]
    assert (remark.line, remark.covered) == (_line_of("scaler_path", tmp_path / "theirs.yml"), True)


@pytest.mark.parametrize(
    ("changed", "log", "message"),
    [
        (
            {"prognostic/3d/u": {"type": "DQuantileScalerTensor", "centroids_": []}},
            (),
            "u (a DQuantileScalerTensor, which",
        ),
        ({"prognostic/3d/u": standard([1, 2, 3], [1, 1, 1])}, (), "u (3 levels in place of 2)"),
        ({}, ("ERA5/dynamic_forcing/2d/sst",), "sst (numbers after `log_transform`)"),
    ],
    ids=["quantile", "levels", "logarithm"],
)
def test_a_scaler_that_cannot_be_taken_over_is_listed_with_its_line(tmp_path, changed, log, message):
    translation = second_generation(tmp_path, log, **changed)
    assert "normalisation" not in translation.metadata
    (remark,) = [remark for remark in translation.remarks if remark.key.endswith("scaler_path")]
    assert remark.meaning.startswith(f"not taken over: {message}")
    assert (remark.line, remark.covered) == (_line_of("scaler_path", tmp_path / "theirs.yml"), False)
    assert f"theirs.yml:{remark.line}: " in report(translation, tmp_path / "theirs.yml", tmp_path / "my.yml")


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"input": {"ERA5": {"x": "{}"}}}', '{"input": {"ERA5": {"x": 1}}}']
)
def test_a_damaged_scaler_file_is_one_message(tmp_path, content):
    (tmp_path / "scalers.json").write_text(content)
    with pytest.raises(UserError, match=r"expected (a scaler file|scalers)"):
        read_scalers(tmp_path / "scalers.json")


# ---- CREDIT's own files ----------------------------------------------------------------------------------------------

DATA = os.environ.get("CREDIT_LIKE_DATA", "")
FOLDER = Path(DATA).parent / "credit_migration" if DATA else Path("absent")
FILES = [
    "arco_era5_wxformer", "weatherbench2_era5_wxformer", "weatherbench2_era5_wxformer_tiny", "wxformer_era5_025deg_6hr",
    "wxformer_npj_era5_028deg",
]  # fmt: skip


def without_network(*_address, **_options):
    raise OSError("no network")  # whether there is one or not


@pytest.mark.skipif(not FOLDER.is_dir(), reason="CREDIT_LIKE_DATA unset, or without CREDIT's own files beside it")
@pytest.mark.parametrize("name", FILES)
def test_credits_own_files(name, tmp_path, monkeypatch, capsys):
    """In at most 60 lines, without an unknown key; `check` finds nothing wrong but that the data are elsewhere."""
    monkeypatch.setenv("USER", "someone")
    monkeypatch.setattr("credit_like.data.files.remote.FsspecStore.from_url", without_network)
    source, output = FOLDER / f"{name}.yml", tmp_path / f"{name}.yml"
    translation = run(source, None, output)
    assert len(output.read_text().splitlines()) <= 60
    assert not [remark for remark in translation.remarks if "unknown" in remark.meaning]
    assert len(report(translation, source, output).splitlines()) > len(translation.remarks)
    theirs, ours = read(source).values, loaded(output)
    named = {
        name
        for section in theirs["data"]["source"].values()
        for group in section["variables"].values()
        for names in (group or {}).values()
        if isinstance(names, list)
        for name in names
    }
    found = {
        spec.name for role in ("prognostic", "diagnostic", "dynamic_forcing", "static")
        for group in getattr(ours.data, role) for spec in group[1]
    }  # fmt: skip
    assert found == named
    with pytest.raises(SystemExit) as end:
        cli.main(["check", str(output)])
    assert end.value.code == 2
    for line in capsys.readouterr().err.splitlines():
        assert "expected" not in line or any(
            w in line for w in ("files that match", "existing file", "does not open", "credit-like[cloud]")
        ), line
