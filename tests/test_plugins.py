"""Parts of an experiment in folders and packages of the user's own."""

import copy
import json
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from credit_like import build, registry
from credit_like.check import checked_experiment, corrections
from credit_like.checkpoint.export import export, load_export
from credit_like.errors import UserError
from credit_like.evaluation.plots import plot_scores
from credit_like.evaluation.results import load_results
from credit_like.evaluation.scorecard import scorecard
from credit_like.losses._trial import Shared, refuse_unshareable
from credit_like.models import build_model
from credit_like.parallel import foreign, tensor_verify
from credit_like.parallel.domain import verify as domain_verify
from credit_like.parallel.runtime import Runtime
from credit_like.schema.errors import ExperimentError
from credit_like.schema.experiment import Experiment
from credit_like.schema.json_schema import experiment_schema
from credit_like.schema.load import dump_experiment, load_experiment
from credit_like.variables import Variables

PARTS = Path(__file__).parent / "parts"
FILE = PARTS / "experiment.yml"
LOSS = """\
from typing import Literal
from credit_like.losses import LossConfig

class Config(LossConfig):
    type: Literal["{name}"] = "{name}"

def pointwise(config, error):
    return {factor} * error.square()
"""


def write(folder, name="mine", factor=1, kind="losses", text=LOSS):
    """A folder with one plug-in."""
    (folder / kind).mkdir(parents=True, exist_ok=True)
    (folder / kind / f"{name.replace('-', '_')}.py").write_text(
        text.replace("{name}", name).replace("{factor}", str(factor))
    )
    return folder


def load(tmp_path, plugins, *overrides):
    """The experiment of a file in tmp_path that includes ours, with other plug-ins."""
    listed = ", ".join([str(PARTS / "my_parts"), *plugins])
    file = tmp_path / "experiment.yml"
    text = FILE.read_text().replace("[my_parts]", f"[{listed}]").replace("runs/waves", str(tmp_path / "run"))
    file.write_text(text)
    return load_experiment(file, overrides)


def problems(tmp_path, plugins, *overrides):
    with pytest.raises(ExperimentError) as caught:
        load(tmp_path, plugins, *overrides)
    return list(map(str, caught.value.problems))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The parts as they are shipped, moved to a folder of their own, trained, rolled out and scored."""
    folder = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(PARTS, folder / "parts")
    save_loc = folder / "run"
    experiment = checked_experiment(folder / "parts" / "experiment.yml", [f"save_loc={save_loc}"])[0]
    assert build.train(experiment) == 0
    assert build.rollout(experiment) == 0
    assert build.evaluate(experiment) == 0
    return experiment, save_loc


def test_parts_of_a_folder_train_forecast_and_score(run):
    _, save_loc = run
    scores = load_results(save_loc / "evaluation")
    worst = scores["u"].sel(metric="worst", region="global")
    assert bool((worst > scores["u"].sel(metric="rmse", region="global")).all())
    assert save_loc / "worst.png" in plot_scores(scores, save_loc)
    assert "worst" in [column.header for column in scorecard(scores).columns]


def test_the_stored_experiment_works_from_elsewhere(run, tmp_path, monkeypatch):
    experiment, save_loc = run
    monkeypatch.chdir(tmp_path)
    assert load_experiment(save_loc / "experiment.yml") == experiment


def test_a_checkpoint_and_an_export_keep_version_and_hash(run, tmp_path, caplog):
    experiment, save_loc = run
    [record] = registry.record(experiment.plugins)
    assert (record["name"], record["version"], record["path"]) == ("my_parts", "1.2", experiment.plugins[0])
    exported = load_export(export(save_loc, tmp_path / "weights.safetensors"))
    assert exported.metadata["plugins"] == [record]
    model = exported.build()
    assert model(torch.zeros(1, 2, 1, 16, 32)).shape == (1, 2, 1, 16, 32)
    moved = shutil.copytree(experiment.plugins[0], tmp_path / "moved")
    assert len(exported.build([str(moved)]).state_dict()) == len(model.state_dict())
    assert "plug-ins changed" not in caplog.text
    with (moved / "losses" / "zonal.py").open("a") as part:
        part.write("# another hash\n")
    exported.build([str(moved)])
    assert "plug-ins changed since the export of weights.safetensors: moved (none → 1.2, sha256 " in caplog.text


@pytest.mark.slow
def test_a_resumed_run_says_that_its_plugins_changed(run, tmp_path, caplog):
    folder = shutil.copytree(run[1].parent, tmp_path / "copy")
    file = folder / "parts" / "experiment.yml"
    experiment = load_experiment(file, [f"save_loc={folder / 'run'}"])
    with caplog.at_level(logging.WARNING):
        assert build.train(experiment) == 0
    assert "plug-ins changed" not in caplog.text
    with (folder / "parts" / "my_parts" / "losses" / "zonal.py").open("a") as part:
        part.write("# another hash\n")
    with caplog.at_level(logging.WARNING):
        assert build.train(experiment) == 0
    assert "plug-ins changed since step 4: my_parts (1.2, sha256 " in caplog.text


def test_forecasts_are_not_continued_with_other_plugins(run, tmp_path, caplog):
    """Not even where the experiment is the same: another code would make the rest of them."""
    folder = shutil.copytree(run[1].parent, tmp_path / "copy")
    experiment = load_experiment(folder / "parts" / "experiment.yml", [f"save_loc={folder / 'run'}"])
    assert build.rollout(experiment) == 0
    record = folder / "run" / "forecasts" / "forecast.json"
    content = json.loads(record.read_text())
    assert len(content.pop("plugins")) == 1
    record.write_text(json.dumps(content))  # as an earlier release wrote it
    assert build.rollout(experiment) == 0
    parts = folder / "parts" / "my_parts"
    assert build.rollout(experiment) == 0
    record.write_text(json.dumps({**content, "plugins": registry.forecast_hashes(experiment.plugins)}))
    assert "plug-ins changed" not in caplog.text
    for kind in ("losses", "metrics"):  # which make no difference to a forecast
        with next((parts / kind).glob("*.py")).open("a") as part:
            part.write("# another hash\n")
    assert build.rollout(experiment) == 0
    assert "plug-ins changed since step-4 " in caplog.text
    with next(parts.glob("models/**/*.py")).open("a") as part:
        part.write("# another hash\n")
    with pytest.raises(UserError, match=r"got some made with another plugins, change the path"):
        build.rollout(experiment)


def test_plugins_are_known_to_their_own_experiment_alone(tmp_path):
    a, b = write(tmp_path / "a", factor=2), write(tmp_path / "b", factor=3)
    plain = {"loss": {"type": "mine"}}
    data = load(tmp_path, []).to_dict()
    first, second = (
        Experiment.model_validate({**data, **plain, "plugins": [*data["plugins"], str(f)]}) for f in (a, b)
    )
    error = torch.ones(1)
    for experiment, factor in ((first, 2), (second, 3), (first, 2)):
        assert registry.of("loss", experiment.loss).pointwise(experiment.loss, error) == factor
    assert "mine" not in registry.names("loss")
    with pytest.raises(ValueError, match="got 'mine'"):
        Experiment.model_validate({**data, **plain})


def test_a_configuration_is_unpickled_where_nothing_is_known(tmp_path):
    experiment = load_experiment(FILE)
    path = tmp_path / "model"
    path.write_bytes(pickle.dumps(experiment))
    code = (
        f"import pickle; e = pickle.load(open({str(path)!r}, 'rb')); from credit_like import registry;"
        "print(e.model.dim, e.data.source[0].steps, registry.of('source', e.data.source[0]).__name__)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.startswith("8 60 credit_like.plugins.my_parts_")


def test_a_misspelt_type_is_answered_with_the_name_of_a_plugin(tmp_path):
    [problem] = problems(tmp_path, [], "loss.type=zonl")
    assert "did you mean 'zonal'?" in problem
    [problem] = problems(tmp_path, [], "model.type=unte")
    assert "did you mean 'unet'?" in problem


def test_a_misspelt_metric_is_answered_with_the_name_of_a_plugin():
    with pytest.raises(ExperimentError, match="did you mean 'worst'"):
        checked_experiment(FILE, ["evaluation.metrics=[wurst]"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = (\n", r"mine.py:1: SyntaxError"),
        ("import os\nimport a_module_that_is_not_there\n", r"mine.py:2: ModuleNotFoundError: No module named 'a_mod"),
        ("\n\nx = undefined\n", r"mine.py:3: NameError"),
        ("import sys\nsys.exit(0)\n", r"mine.py:2: SystemExit: 0"),
        ("def pointwise(config, error): ...\n", r"mine.py:1, got no Config"),
        ("class Config: ...\n", r"mine.py:1, got no pointwise"),
        (
            LOSS.replace("{name}", "other"),
            r"mine.py:1, got a Config with the type 'other'; write `type: Literal\['mine'\]",
        ),
    ],
)
def test_a_part_that_cannot_be_imported_is_one_message(tmp_path, text, said):
    write(tmp_path / "a", text=text)
    text = (
        FILE.read_text()
        .replace("[my_parts]", f"[{PARTS / 'my_parts'}, a]")
        .replace("loss: {type: zonal}", "loss:\n  type: mine")
    )
    (tmp_path / "experiment.yml").write_text(text)
    line = text.splitlines().index("  type: mine") + 1
    with pytest.raises(ExperimentError, match=said) as caught:
        load_experiment(tmp_path / "experiment.yml")
    [problem] = caught.value.problems
    assert (problem.line, problem.key) == (line, "loss.type")
    assert "\n" not in str(problem)


CORRECTION = """\
from typing import Literal
from credit_like.schema.base import Section

class Config(Section):
    type: Literal["{name}"] = "{name}"

def build(config, variables, store, statistics, *, rows=slice(None), reduce=lambda x: x):
    import torch
    height, width = store.grid.height, store.grid.width
    weights = torch.arange(1.0, 1 + height)[:, None]

    class Fix(torch.nn.Module):
        def forward(self, after, before):
            change = after - before
            return after - ({factor})

    return Fix()
"""
CORRECTIONS = {
    "change.mean((2, 3), keepdim=True)": r"a difference of .* standard deviations .*bad\.py.*`reduce`",
    "reduce(change.sum((2, 3), keepdim=True)) / (height * width)": "",
    "change.roll(1, 2)": "a difference of .* standard deviations",
    "change.roll(1, 3)": "",
    "change / weights": r"bad\.py:15: .*match the size",
    "change / weights[rows]": "",
    "change / (weights[rows] - 1)": "",
    "(change / 0).clamp(min=0)": "",
}


def _refusal(rank, file, overrides):
    experiment = load_experiment(file, overrides)
    runtime = Runtime.start(experiment.trainer.parallelism, torch.device("cpu"))
    try:
        build.build_context(experiment, runtime)
    except UserError as error:
        return str(error)
    return ""


def test_a_correction_that_is_another_one_on_a_band_of_rows_is_refused(tmp_path, run_ranks):
    names = {f"bad{number}": factor for number, factor in enumerate(CORRECTIONS)}
    for name, factor in names.items():
        write(tmp_path / "parts", name, factor, kind="physics", text=CORRECTION)
    load(tmp_path, [str(tmp_path / "parts")])
    for name, factor in names.items():
        overrides = [f"physics=[{{type: {name}}}]", "trainer.parallelism={data: fsdp2, domain: 2}"]
        for said in run_ranks(2, _refusal, tmp_path / "experiment.yml", overrides):
            expected = CORRECTIONS[factor].replace("bad", name)
            assert re.search(rf"physics\.0: .*{expected}", said) if expected else said == "", (factor, said)


def test_a_correction_may_write_to_a_prediction_of_one_channel(monkeypatch):
    """Its rows were corrected twice in the trial, as a part and as rows of the whole field."""

    class Halve(nn.Module):
        def forward(self, after, before):
            return 1 * after.mul_(0.5)

    fields = [torch.arange(12.0).view(1, 1, 4, 3) ** power for power in (2, 1, 1)]
    monkeypatch.setattr(corrections, "_fields", lambda context: fields)
    runtime = SimpleNamespace(device=torch.device("cpu"), domain_shape=(2, 1), sum_over_domain=None)
    context = SimpleNamespace(runtime=runtime, rows=slice(0, 2), columns=slice(None), variables=SimpleNamespace(n=len))
    context.whole_rows = context.store = context.statistics = None
    assert corrections._problem(context, SimpleNamespace(build=lambda *_, **__: Halve()), None) == ""


def _refusal_of_one(rank, file, overrides):
    try:
        return _refusal(rank, file, overrides)
    except RuntimeError:
        return "lost the other rank"


def test_a_correction_that_fails_on_one_rank_alone_does_not_hold_up_the_others(tmp_path, run_ranks):
    factor = "reduce(change.sum(2 if rows.start else 9))"
    folder = write(tmp_path / "parts", "bad", factor, kind="physics", text=CORRECTION)
    load(tmp_path, [str(folder)])
    overrides = ["physics=[{type: bad}]", "trainer.parallelism={data: fsdp2, domain: 2}"]
    first, second = run_ranks(2, _refusal_of_one, tmp_path / "experiment.yml", overrides, timeout=60)
    assert re.search(r"physics\.0: .*bad\.py:15: Dimension out of range", first)
    assert second == "lost the other rank"


MODEL = """\
from typing import Literal
from credit_like.schema.base import Section

class Config(Section):
    type: Literal["{name}"] = "{name}"
    predict: Literal["increment", "state"] = "increment"

def build(config, **sizes):
    import torch
    return torch.nn.Linear(1, int(torch.linspace(0, 8, 3)[1].item()))
"""


PARTLY = {
    "quantile": ("error.square() * (error > error.quantile(0.9))", {"samples", "rows"}),
    "sample": ("error.square() / error.square().mean((1, 2, 3), keepdim=True)", {"rows"}),
    "gradient": ("(error - error.roll(1, -2)).square()", {"rows"}),
    "spectrum": ("__import__('torch').fft.fft2(error).abs()", {"rows"}),
    "heights": ("error.square() * __import__('torch').linspace(1, 2, 16)[:, None]", {"bands"}),
    "points": ("(error - error.roll(1, -1)).square()\n\nby_point = True", {"columns"}),
    "counting": ("error.square() * len(calls.append(0) or calls)\n\ncalls = []", {"again"}),
    "mean": ("error.square().mean((2, 3))", {"shape"}),
    "number": ("float(error.square().mean())", {"shape"}),
    "zonal": ("(error - error.roll(1, -1)).square()", set()),
    "undefined": ("error.log()", set()),
    "infinite": ("error.exp() / error.clamp(min=0)", set()),
    "large": ("__import__('torch').linspace(0, 1, 400)[:, None] + error.abs().exp()", {"bands"}),
}
SAID = {
    "samples": "treats every sample by itself",
    "rows": "treats every row by itself",
    "bands": r"works on bands of rows .*bad\.py:8 for 4 of \d+ rows",
    "columns": "treats every point by itself .*remove by_point",
    "again": "when it was called again",
    "shape": "returns a value for each point",
}


@pytest.mark.parametrize("name", PARTLY)
def test_a_loss_that_is_another_one_in_parts_is_refused(tmp_path, name):
    text, refused = PARTLY[name]
    folder = write(tmp_path / "parts", "bad", "error.square()", text=LOSS.replace("{factor} * error.square()", text))
    config = load(tmp_path, [str(folder)], "loss={type: bad}").loss
    grid = (400, 8) if name == "large" else (16, 8)
    refuse_unshareable(config, 2, grid, 1, Shared(False, False, False), torch.device("cpu"))
    found = set()
    for part in ("samples", "rows", "columns"):
        shared = Shared(**{each: each == part for each in ("samples", "rows", "columns")})
        try:
            refuse_unshareable(config, 2, grid, 1, shared, torch.device("cpu"))
        except UserError as error:
            found |= {what for what, said in SAID.items() if re.search(said, str(error)) and "bad.py" in str(error)}
    assert found == refused


@pytest.mark.parametrize("text", ["error.clamp_(-1, 1).square()", "error.square_()", "error.mul_(2).square()"])
def test_a_loss_of_a_sum_that_writes_to_the_errors_is_refused(tmp_path, text):
    """The losses after it would get other errors; alone it may do so."""
    folder = write(tmp_path / "parts", "bad", text=LOSS.replace("{factor} * error.square()", text))
    terms = "loss={type: sum, terms: [{loss: {type: bad}}, {loss: {type: mse}}]}"
    others = "loss={type: sum, terms: [{loss: {type: mae}}, {loss: {type: mse}}]}"
    together, alone, careful = (
        load(tmp_path, [str(folder)], loss).loss for loss in (terms, "loss={type: bad}", others)
    )
    for shared in (Shared(False, False, False), Shared(True, True, True)):
        for allowed in (alone, careful):
            refuse_unshareable(allowed, 2, (16, 8), 1, shared, torch.device("cpu"))
        with pytest.raises(
            UserError, match=r"leaves the errors and the target as they are .*bad\.py, got one that writes"
        ):
            refuse_unshareable(together, 2, (16, 8), 1, shared, torch.device("cpu"))


def test_a_training_with_micro_batches_refuses_a_loss_of_several_samples(tmp_path):
    text = LOSS.replace("{factor} * error.square()", PARTLY["quantile"][0])
    folder = write(tmp_path / "parts", "bad", text=text)
    experiment = load(tmp_path, [str(folder)], "loss={type: bad}", "trainer.micro_batch_size=4")
    with pytest.raises(UserError, match=r"treats every sample by itself .*bad\.py"):
        build.train(experiment)


def test_a_model_that_reads_values_where_it_is_built_is_one_message(tmp_path):
    folder = write(tmp_path / "parts", "reader", kind="models", text=MODEL)
    experiment = load(tmp_path, [str(folder)], "model={type: reader}")
    variables = Variables(experiment.data)
    with (
        pytest.raises(
            UserError, match=r"model.type: .*models/reader.py:10: .*compute numbers there with Python or numpy"
        ),
        torch.device("meta"),
    ):
        build_model(experiment, variables, 8, 16)
    assert build_model(experiment, variables, 8, 16).out_features == 4


def test_a_metric_that_cannot_be_imported_is_found_by_check(tmp_path):
    write(tmp_path / "a", "broken", kind="metrics", text="x = undefined\n")
    text = FILE.read_text().replace("[my_parts]", f"[{PARTS / 'my_parts'}, a]").replace("worst]", "broken]")
    (tmp_path / "experiment.yml").write_text(text)
    with pytest.raises(ExperimentError, match=r"metrics.2: expected a metric .*broken.py:1: NameError"):
        checked_experiment(tmp_path / "experiment.yml")


def test_nothing_but_the_named_parts_is_run(tmp_path):
    folder = write(tmp_path / "a")
    for name in ("setup.py", "conftest.py", "losses/other.py", "losses/_private.py", "models.py"):
        (folder / name).write_text("raise SystemExit('run')\n")
    data = load(tmp_path, []).to_dict()
    experiment = Experiment.model_validate(
        {**data, "loss": {"type": "mine"}, "plugins": [*data["plugins"], str(folder)]}
    )
    assert experiment.loss.type == "mine"


def test_what_is_no_file_in_a_folder_of_plugins_has_no_contents(tmp_path):
    folder = write(tmp_path / "a")
    [before] = registry.record([str(folder)])
    (folder / "losses" / "gone.py").symlink_to("nowhere")
    (folder / "losses" / "folder.py").mkdir()
    os.mkfifo(folder / "losses" / "pipe.py")
    os.mkfifo(folder / "__init__.py")
    assert registry.record([str(folder)]) == [before]


def test_names_that_are_taken_are_refused(tmp_path):
    [problem] = problems(tmp_path, [str(write(tmp_path / "a", "mse"))])
    assert "expected a loss of another name than 'mse', which credit_like has" in problem
    [problem] = problems(tmp_path, [str(write(tmp_path / "b", "zonal"))])
    assert f"which {PARTS / 'my_parts'} has" in problem
    assert "plugins.1" in problem


@pytest.mark.parametrize("plugin", ["./nothing", "no_such_package", ".", "yaml", "..."])
def test_what_is_no_folder_of_plugins_is_refused(tmp_path, plugin):
    [problem] = problems(tmp_path, [plugin])
    assert problem.startswith(f"{tmp_path / 'experiment.yml'}:")
    assert "plugins.1: expected a folder" in problem


def test_a_folder_named_on_the_command_line_is_relative_to_where_one_is(tmp_path, monkeypatch):
    write(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    experiment = load(tmp_path, [], f"plugins=[a, {PARTS / 'my_parts'}]")
    assert experiment.plugins[0] == str(tmp_path / "a")


def test_an_importable_package_has_parts(tmp_path, monkeypatch):
    write(tmp_path / "weather_parts", "far-away")
    (tmp_path / "weather_parts" / "__init__.py").write_text("__version__ = '3'\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "here").mkdir()
    data = load(tmp_path / "here", []).to_dict()
    plugins = [*data["plugins"], "weather_parts"]
    experiment = Experiment.model_validate({**data, "loss": {"type": "far-away"}, "plugins": plugins})
    assert type(experiment.loss).__module__ == "weather_parts.losses.far_away"
    assert registry.record(plugins)[1]["version"] == "3"


def test_an_installed_package_announces_itself(tmp_path, monkeypatch):
    write(tmp_path / "announced_parts", "announced")
    info = tmp_path / "announced_parts-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: announced-parts\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[credit_like.plugins]\nmine = announced_parts\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry._announced.cache_clear()
    try:
        with registry.searching():
            assert "announced" in registry.names("loss")
            assert registry.module("loss", "announced").__name__ == "announced_parts.losses.announced"
    finally:
        monkeypatch.undo()
        registry._announced.cache_clear()


def test_the_schema_knows_them():
    jsonschema = pytest.importorskip("jsonschema")
    data = load_experiment(FILE).to_dict()
    ours, with_parts = experiment_schema(), experiment_schema([str(PARTS / "my_parts")])
    jsonschema.Draft202012Validator(with_parts).validate(json.loads(json.dumps(data)))
    assert list(jsonschema.Draft202012Validator(ours).iter_errors(data))
    assert "worst" in with_parts["$defs"]["EvaluationSection"]["properties"]["metrics"]["items"]["enum"]
    assert "loss.zonal" not in ours["$defs"]


def test_an_experiment_without_plugins_is_stored_as_before():
    root = Path(__file__).parents[1]
    assert "plugins" not in dump_experiment(load_experiment(root / "config" / "demo.yml"))


def test_a_folder_that_is_gone_is_named(tmp_path):
    with pytest.raises(UserError, match="expected a folder of plug-ins, got"):
        registry.locate(str(tmp_path / "gone"))


class Around(nn.Module):
    """A model of one layer of others."""

    def __init__(self, layer):
        super().__init__()
        self.in_channels, self.frames, self.height, self.width = 4, 1, 6, 8
        self.layer = layer

    def forward(self, x):
        return self.layer(x[:, :, 0])[:, :, None]


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4, 1, 1))

    def forward(self, x):
        self.scale.mul_(0.9).add_(x.detach().abs().mean((0, 2, 3))[:, None, None])
        return x / self.scale


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4, 1, 1))

    def forward(self, x):
        return x.mul(self.scale).add_(1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.BatchNorm2d(4), [r"layer \(BatchNorm2d\) takes mean and variance of the samples"]),
        (lambda: nn.BatchNorm2d(4).eval(), []),
        (lambda: nn.InstanceNorm2d(4, affine=True), []),
        (
            lambda: nn.InstanceNorm2d(4, track_running_stats=True),
            [r"changes its buffer layer.running_mean", r"changes its buffer layer.running_var"],
        ),
        (Noisy, [r"layer \(Noisy\) draws random numbers \(randn_like\)"]),
        (Counting, [r"layer \(Counting\) changes its buffer layer.scale"]),
        (Shifted, []),
        (lambda: nn.Conv2d(4, 4, 3, padding=1), []),
    ],
)
def test_what_depends_on_how_samples_are_shared_is_logged(caplog, make, said):
    with torch.device("meta"):
        model = Around(make())
    foreign.warn_of_samples(model)
    assert len(caplog.messages) == len(said)
    for message, expected in zip(caplog.messages, said, strict=True):
        assert re.search(expected, message), message


def test_a_layer_that_is_registered_twice_keeps_its_parameters():
    layer = nn.Conv2d(4, 4, 1, device="meta")
    model = Around(nn.Sequential(layer, layer))
    parameters = dict(model.named_parameters())
    foreign.warn_of_samples(model)
    assert all(value is parameters[name] for name, value in model.named_parameters())


class Keeping(Around):
    """A model whose first forward keeps tensors for later ones."""

    shard_unit = True
    tensor_columns, tensor_rows = ("up",), ("down",)

    def __init__(self):
        super().__init__(None)
        self.up, self.down = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.ramp, self.calls, self.ramps = None, 0, {}

    def forward(self, x):
        self.calls += 1
        if self.ramp is None:
            self.ramp = torch.ones(8, device=x.device)
        ramp = self.ramps.setdefault(8, torch.ones(8, device=x.device))
        return self.down(self.up(x[:, :, 0]) * self.ramp * ramp)[:, :, None]


@pytest.mark.parametrize("trace", ["samples", "tensor", "domain"])
def test_a_trace_leaves_a_model_as_it_is(trace):
    with torch.device("meta"):
        model = Keeping()
    if trace == "samples":
        foreign.warn_of_samples(model)
    elif trace == "tensor":
        assert tensor_verify.verify(model, 2)
    else:
        domain_verify.verify(model, 2)
    assert (model.ramp, model.calls, model.ramps) == (None, 0, {})
    assert list(model._modules) == ["up", "down"]


def test_copies_of_layers_have_no_values_that_are_not_used(caplog):
    with torch.device("meta"):
        foreign.warn_of_initial_values(Around(nn.ModuleList(copy.deepcopy(nn.Linear(3, 3)) for _ in range(2))))
        foreign.warn_of_initial_values(
            Around(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, batch_first=True), 2))
        )
    assert not caplog.messages


def test_values_of_a_constructor_that_are_not_used_are_logged(caplog):
    layers = ("linear", "norm", "rows", "attention")

    def made(zero=()):
        with torch.device("meta"):
            model = Around(
                nn.ModuleDict(
                    zip(
                        layers,
                        (nn.Linear(3, 3), nn.LayerNorm(3), nn.Embedding(4, 3, 0), nn.MultiheadAttention(4, 2)),
                        strict=True,
                    )
                )
            )
            for name in zero:
                nn.init.zeros_(model.layer[name].weight)
        return model

    foreign.warn_of_initial_values(made())
    assert not caplog.messages
    foreign.warn_of_initial_values(made(["linear", "rows"]))
    [message] = caplog.messages
    assert message.startswith("layer.linear.weight, layer.rows.weight: the values")


def test_a_training_logs_what_a_model_of_others_does_in_vain(tmp_path, caplog, monkeypatch):
    text = MODEL.replace(
        "return torch.nn.Linear(1, int(torch.linspace(0, 8, 3)[1].item()))",
        "from tests.test_plugins import Zero; return Zero(sizes)",
    )
    folder = write(tmp_path / "parts", "zero", kind="models", text=text)
    experiment = load(tmp_path, [str(folder)], "model={type: zero}", "trainer.micro_batch_size=4")
    variables = Variables(experiment.data)
    build.parallel_model(experiment, variables, build.open_store(experiment.data, variables), Runtime())
    assert any("layer.weight, layer.bias: the values" in message for message in caplog.messages)
    assert any("draws random numbers" in message for message in caplog.messages)
    caplog.clear()
    # The weights are those of a checkpoint.
    monkeypatch.setattr(build, "has_checkpoints", lambda _: True)
    build.parallel_model(experiment, variables, build.open_store(experiment.data, variables), Runtime())
    assert not any("the values" in message for message in caplog.messages)


class Zero(Around):
    def __init__(self, sizes):
        super().__init__(nn.Conv2d(sizes["in_channels"], sizes["out_channels"], 1))
        self.in_channels, self.frames = sizes["in_channels"], sizes["frames"]
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x):
        return super().forward(x + torch.rand_like(x))


class Lost(Zero):
    """A model with a tensor that is not registered."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.offset = torch.ones(3)


class Unfilled(Zero):
    """A model with a buffer that nothing fills."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.register_buffer("offset", torch.ones(3))


@pytest.mark.parametrize(("name", "said"), [("Lost", "register_buffer"), ("Unfilled", "define `reset_buffers")])
def test_a_run_refuses_a_model_whose_values_would_be_lost(tmp_path, name, said):
    text = MODEL.replace(
        "return torch.nn.Linear(1, int(torch.linspace(0, 8, 3)[1].item()))",
        f"from tests.test_plugins import {name}; return {name}(sizes)",
    )
    folder = write(tmp_path / "parts", "bad", kind="models", text=text)
    with pytest.raises(UserError, match=f"^offset: .*{said}"):
        build.build_context(load(tmp_path, [str(folder)], "model={type: bad}"), Runtime())


class Tied(Around):
    """Two layers of one weight, and a buffer that only `reset_buffers` fills."""

    def __init__(self, sizes):
        super().__init__(nn.Conv2d(sizes["in_channels"], sizes["out_channels"], 1))
        self.in_channels, self.frames = sizes["in_channels"], sizes["frames"]
        self.again = nn.Conv2d(sizes["in_channels"], sizes["out_channels"], 1)
        self.again.weight = self.layer.weight
        self.register_buffer("factor", torch.full((), float("nan")), persistent=False)

    def reset_buffers(self):
        self.factor.fill_(2)

    def forward(self, x):
        return super().forward(x * self.factor) + self.again(x[:, :, 0])[:, :, None]


def test_averages_of_a_weight_of_two_layers_are_those_of_both(tmp_path):
    text = MODEL.replace(
        "return torch.nn.Linear(1, int(torch.linspace(0, 8, 3)[1].item()))",
        "from tests.test_plugins import Tied; return Tied(sizes)",
    )
    folder = write(tmp_path / "parts", "tied", kind="models", text=text)
    experiment = load(tmp_path, [str(folder)], "model={type: tied}", "trainer.use_ema=true", "trainer.ema_decay=0.9")
    assert build.train(experiment) == 0
    context = build.build_context(experiment, Runtime(), train=False)
    checkpoint = build.load_weights(context)
    average = checkpoint.read("ema/layer.weight")
    assert not torch.equal(average, checkpoint.read("model/layer.weight"))
    exported = load_export(export(tmp_path / "run", tmp_path / "tied.safetensors")).build()
    for model in (context.stepper.model, exported):
        assert model.again.weight is model.layer.weight
        assert torch.equal(model.layer.weight, average)
        assert float(model.factor) == 2


def test_layers_of_one_weight_that_were_trained_apart_are_refused(tmp_path, monkeypatch):
    text = MODEL.replace(
        "return torch.nn.Linear(1, int(torch.linspace(0, 8, 3)[1].item()))",
        "from tests.test_plugins import Tied; return Tied(sizes)",
    )
    folder = write(tmp_path / "parts", "tied", kind="models", text=text)
    experiment = load(tmp_path, [str(folder)], "model={type: tied}")
    with monkeypatch.context() as patch:
        tied = Tied.__init__
        patch.setattr(Tied, "__init__", lambda self, sizes: (tied(self, sizes), apart(self))[0])
        assert build.train(experiment) == 0
        exported = load_export(export(tmp_path / "run", tmp_path / "tied.safetensors"))
    context = build.build_context(experiment, Runtime(), train=False)
    said = "expected one tensor for layer.weight and again.weight"
    for use in (exported.build, lambda: build.load_weights(context), lambda: build.train(longer(experiment))):
        with pytest.raises(UserError, match=said):
            use()


def apart(model):
    model.again.weight = nn.Parameter(torch.empty_like(model.again.weight))


def longer(experiment):
    return experiment.model_copy(update={"trainer": experiment.trainer.model_copy(update={"epochs": 2})})
