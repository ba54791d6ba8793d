"""Where the tests of a module are that has no test file of its name.

Most modules `credit_like/<path>/<name>.py` have their tests in `tests/<path>/test_<name>.py`. The others are listed here, and the
tests below keep the list complete and true.
"""

from pathlib import Path

ROOT = Path(__file__).parents[1]

ELSEWHERE = {
    "__main__": "test_cli.py",
    "bands": "parallel/domain/test_rows.py",
    "check": "malformed/test_malformed.py",
    "context": "test_build.py",
    "figures": "evaluation/test_plots.py",
    "lock": "faults/test_race.py",
    "naming": "evaluation/test_plots.py",
    "nested": "test_runs.py",
    "rollout": "inference/test_rollout.py",
    "processes": "faults/test_group_signals.py",
    "state": "test_stepper.py",
    "checkpoint/commands": "checkpoint/test_export.py",
    "checkpoint/credit_scalers": "test_migrate.py",
    "checkpoint/errors": "checkpoint/test_manager.py",
    "checkpoint/files": "checkpoint/test_manager.py",
    "checkpoint/format": "checkpoint/test_manager.py",
    "checkpoint/package": "inference/test_from_files.py",
    "data/aliases": "data/test_store.py",
    "data/axes": "data/test_store.py",
    "data/locate": "data/test_store.py",
    "data/files/find": "data/sources/test_netcdf.py",
    "data/loading/arena": "data/loading/test_loader.py",
    "data/sources/_files": "data/sources/test_netcdf.py",
    "data/sources/_cache": "data/sources/test_synthetic.py",
    "data/sources/_grib_files": "data/sources/test_grib.py",
    "data/declared": "physics/test_physics.py",
    "data/named": "interop/test_earth2studio.py",
    "data/stored_statistics": "data/sources/test_anemoi.py",
    "data/tools/audit": "data/tools/test_preprocess.py",
    "data/tools/stamps": "data/tools/test_preprocess.py",
    "evaluation": "evaluation/test_metrics.py",
    "evaluation/metrics": "evaluation/test_metrics.py",
    "evaluation/charts": "evaluation/test_plots.py",
    "evaluation/coasts": "evaluation/test_plots.py",
    "evaluation/needs": "malformed/test_malformed.py",
    "inference/paths": "inference/test_forecast.py",
    "inference/plan": "inference/test_forecast.py",
    "inference/times": "inference/test_rollout.py",
    "inference/writers": "inference/test_forecast.py",
    "inference/layout": "inference/test_conventions.py",
    "launch": "launch/test_chain_standin.py",
    "launch/local": "launch/test_real_training.py",
    "losses": "losses/test_losses.py",
    "migrate/absent": "test_migrate.py",
    "migrate/blocks": "test_migrate.py",
    "migrate/corrections": "test_migrate.py",
    "migrate/data": "test_migrate.py",
    "migrate/document": "test_migrate.py",
    "migrate/forecasts": "test_migrate.py",
    "migrate/jobs": "test_migrate.py",
    "migrate/loss": "test_migrate.py",
    "migrate/model": "test_migrate.py",
    "migrate/text": "test_migrate.py",
    "migrate/trainer": "test_migrate.py",
    "models/persistence": "test_registry.py",
    "models/wxformer": "models/test_wxformer.py",
    "nn": "models/test_wxformer.py",
    "nn/area": "losses/test_losses.py",
    "nn/constants": "training/test_host_never_waits.py",
    "nn/init": "nn/test_initial_values.py",
    "nn/linear": "nn/test_spectral_norm.py",
    "ops": "ops/test_ops.py",
    "ops/cpu": "ops/cpu/test_blocks.py",
    "parallel": "parallel/test_runtime.py",
    "parallel/observe": "parallel/test_communication.py",
    "parallel/processes": "test_verify.py",
    "parallel/shards": "parallel/test_apply.py",
    "parallel/trace": "parallel/domain/test_verify.py",
    "parallel/unwrap": "parallel/test_fsdp2.py",
    "parallel/domain": "parallel/domain/test_apply.py",
    "parallel/domain/rules": "parallel/domain/test_verify.py",
    "physics": "physics/test_physics.py",
    "plan": "plan/test_simulate.py",
    "plan/calibrate": "plan/test_machine.py",
    "plan/run": "plan/test_command.py",
    "plan/show": "plan/test_estimate.py",
    "schema": "schema/test_load.py",
    "schema/data": "schema/test_checks.py",
    "schema/experiment": "schema/test_checks.py",
    "schema/losses": "training/test_members.py",
    "schema/plugin": "test_plugins.py",
    "schema/shipped": "test_wheel.py",
    "training": "integration/test_restart.py",
    "training/derived": "training/test_forecasts.py",
    "training/step": "parallel/test_layouts.py",
    "training/stop": "faults/test_signals.py",
    "training/optimizers": "parallel/test_layouts.py",
    "training/schedulers": "test_registry.py",
}
"""Module, or folder for all its other modules → the file under `tests` to read first."""


def modules():
    """Return the modules of the package that have no test file of their name, as paths inside it without the suffix."""
    package = ROOT / "credit_like"
    names = [
        path.relative_to(package).with_suffix("") for path in sorted(package.rglob("*.py")) if path.stem != "__init__"
    ]
    return [
        str(name) for name in names if not (ROOT / "tests" / name.parent / f"test_{name.stem.lstrip('_')}.py").is_file()
    ]


def test_every_module_has_a_file_of_its_name_or_an_entry():
    assert [name for name in modules() if not {name, name.rpartition("/")[0]} & set(ELSEWHERE)] == []


def test_the_files_exist_and_no_entry_is_left_over():
    assert [name for name, file in ELSEWHERE.items() if not (ROOT / "tests" / file).is_file()] == []
    assert {name for name in ELSEWHERE if not any(name in (m, m.rpartition("/")[0]) for m in modules())} == set()
