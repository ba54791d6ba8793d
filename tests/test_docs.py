"""README and docs: blocks of code work or are marked as not executed, every key has a description, and the site builds."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from html.parser import HTMLParser
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import numpy as np
import pytest
import typer
import xarray as xr
import yaml

from credit_like.cli import app
from credit_like.evaluation.results import save_results
from credit_like.schema.load import load_experiment

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *ROOT.glob("models/*/card.md"),
]
GALLERY = sorted((ROOT / "docs" / "gallery").glob("0*.md"))
BLOCK = re.compile(
    r"^(?:<!-- not executed: (?P<why>.+) -->\n)?```(?P<language>.*)\n(?P<text>(?:.*\n)*?)```$", re.MULTILINE
)
SHELLS = ("sh", "bash", "console")
STATED = {"data.md": "from dask_jobqueue import"}
"""Page → beginning of a block that is not executed because it needs a batch system, as the text above it says."""

BASE = """
name: base
save_loc: runs/base
data:
  source: {type: synthetic}
  timestep: 6h
  prognostic: {surface: [t]}
  train: [2000-01-01, 2000-01-05]
  valid: [2000-01-06, 2000-01-07]
  test: [2000-01-08, 2000-01-09]
model: {type: wxformer}
"""


@dataclass(frozen=True)
class Block:
    page: Path
    language: str
    text: str
    why: str | None

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}: {self.text[:60]!r}"

    @property
    def executed(self):
        return self.why is None and not self.text.startswith(STATED.get(self.page.name, "\0"))


def blocks(*languages):
    found = [
        Block(page, match["language"], match["text"], match["why"])
        for page in PAGES
        for match in BLOCK.finditer(page.read_text())
    ]
    return [block for block in found if not languages or block.language in languages]


def script(name):
    spec = spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_block_says_what_it_is():
    found = blocks()
    assert len(found) > 60
    assert [str(block) for block in found if block.language not in ("yaml", "python", "text", *SHELLS)] == []
    for page in PAGES:  # no block that the expression above does not see
        assert page.read_text().count("\n```") == 2 * sum(block.page == page for block in found), page


def test_blocks_of_experiments_are_valid(tmp_path):
    """Each as it stands where it is a whole experiment, otherwise as a part of one; those with parts of one's own run elsewhere."""
    (tmp_path / "base.yml").write_text(BASE)
    checked = 0
    for block in blocks("yaml"):
        if block.page.name == "extending.md" or not block.executed:
            continue
        whole = "include:" in block.text
        (tmp_path / "block.yml").write_text(block.text if whole else f"include: base.yml\n{block.text}")
        load_experiment(tmp_path / "block.yml")
        checked += 1
    assert checked > 15


def commands(text):
    """The commands of a shell block, as lists of words; comments are left out."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            yield words[:end]
            words = words[end + 1 :]


def parse(words):
    """Parse the arguments of `credit-like` without running the command."""
    group = typer.main.get_command(app)
    command = group.get_command(None, words[0])
    assert command is not None, words
    command.make_context(words[0], list(words[1:]))


def known(words):
    """Whether a command is one of ours with arguments that it takes, or needs nothing that could be wrong."""
    if words[0] == "credit-like":
        parse(words[1:])
    elif words[0] in ("torchrun", "python") and "credit_like.cli" in words:
        parse(words[words.index("credit_like.cli") + 1 :])
    elif words[0] in ("torchrun", "python"):
        file = next(word for word in words if word.endswith(".py"))
        assert (ROOT / file).is_file(), words
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    else:
        return words[0] == "export"
    return True


def test_commands_of_shell_blocks_exist_and_take_their_options():
    parsed = 0
    for block in blocks(*SHELLS):
        for words in commands(block.text):
            if words and (block.executed or words[0] == "credit-like"):
                assert known(words), f"{block}: mark the block as not executed, or leave out {words}"
                parsed += words[0] == "credit-like"
    assert parsed > 30


def test_an_option_that_does_not_exist_is_found():
    with pytest.raises(Exception, match="No such option"):
        parse(["check", "my.yml", "--word-size", "4"])


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """A folder with the runs that the pages speak of: scores, and a log."""
    leads = np.array([6, 12], "timedelta64[h]").astype("timedelta64[ns]")
    coords = {"source": ["model"], "metric": ["rmse"], "region": ["global"], "lead_time": leads}
    scores = xr.Dataset({"u": (tuple(coords), np.ones((1, 1, 1, 2)))}, coords).assign(initial_times=5)
    by_init = {"statistic": ["rmse.mse"], "init_time": np.arange(5).astype("datetime64[D]").astype("datetime64[ns]")}
    dims = ("source", "statistic", "init_time", "region", "lead_time")
    scores = scores.assign_coords(by_init).assign(u_by_init=(dims, np.ones((1, 1, 5, 1, 2), np.float32)))
    for name in ("my-experiment", "my-other-experiment"):
        folder = tmp_path / "runs" / name
        save_results(scores.assign_coords(provenance=("source", ["model"])), folder / "evaluation")
    folder = tmp_path / "runs" / "my-experiment"
    (folder / "log.jsonl").write_text('{"step": 1, "epoch": 0, "loss": 1.0}\n')
    monkeypatch.chdir(tmp_path)


def test_python_blocks_run(run_folder):
    ran = [block for block in blocks("python") if block.page.name != "extending.md" and block.executed]
    for block in ran:
        exec(compile(block.text, str(block), "exec"), {})
    assert ran


def test_marked_blocks_are_few():
    assert sum(not block.executed for block in blocks()) < len(blocks()) / 6


@pytest.mark.parametrize("page", GALLERY, ids=lambda path: path.stem)
def test_the_gallery_shows_the_notebooks_as_they_are(page):
    cells = nbformat.read(ROOT / "notebooks" / f"{page.stem}.ipynb", as_version=4).cells
    shown = [match["text"].strip() for match in BLOCK.finditer(page.read_text()) if match["language"] == "python"]
    assert shown == [
        "\n".join(line.rstrip() for line in c.source.splitlines()).strip() for c in cells if c.cell_type == "code"
    ]
    images = re.findall(r"!\[.*?\]\((.+?)\)", page.read_text())
    assert all((page.parent / image).is_file() for image in images)


def test_there_is_a_page_for_every_notebook():
    assert [page.stem for page in GALLERY] == sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs/gallery/index.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(page):
    text = BLOCK.sub("", page.read_text())
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_links_of_the_site_stay_in_it():
    hooks = script("hooks")
    page = ROOT / "docs" / "ensembles.md"
    text = "[a](../credit_like/losses/mse.py) [b](model.md#keys) [c](https://x.org/y) [d](../README.md)"
    assert hooks.rewritten(text, page) == (
        "[a](repository/credit_like/losses/mse.py.md) [b](model.md#keys) [c](https://x.org/y) [d](index.md)"
    )
    back = hooks.rewritten("[e](../../benchmarks/results/recipes.md)", ROOT / "models" / "wxformer-tiny" / "card.md")
    assert back == "[e](../../benchmarks/results/recipes.md)"
    assert "repository/benchmarks/results/recipes.md" in hooks.linked()


def test_a_recording_becomes_a_picture():
    pytest.importorskip("pyte", reason="the extra `docs` is not installed")
    cast = script("cast")
    program = "print('one'); print('\\x1b[31mtwo', chr(38), 'three\\x1b[0m')"  # a picture shows the command as well
    events, status = cast.record([sys.executable, "-c", program])
    assert status == 0
    found = cast.frames([*events, (events[-1][0] + 1.0, b"")], seconds=2.0, number=10)
    assert any("two &amp; three" in line for line in found[-1][0])
    assert 0 <= found[0][1] <= found[-1][1] < 2.0
    picture = cast.svg(found, 2.0, 1.0)
    ElementTree.fromstring(picture)
    assert picture.count("two &amp; three") == 1
    assert "//" not in picture.replace("http://www.w3.org/2000/svg", "")


# ---- the reference -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference():
    return script("reference")


def test_every_key_has_description_unit_and_an_example_that_is_valid(reference, tmp_path, monkeypatch):
    (tmp_path / "my_parts").mkdir()
    monkeypatch.chdir(tmp_path)
    wrong, keys = [], 0
    for part in reference.parts():
        schemas = reference.properties(part)
        for key, field in part.fields():
            keys += 1
            example = reference.example_of(part, key, field, schemas[key])
            lacks = {
                "description": not field.description,
                "unit": reference.has_numbers(schemas[key]) and not reference.lookup(reference.UNITS, part, key),
                "example": example is None,
                "valid example": example is not None and key != "plugins" and reference.problems(part, key, example),
            }
            wrong += [f"{part.anchor}.{key} has no {what}" for what, absent in lacks.items() if absent]
    assert not wrong, "\n".join(wrong)
    assert keys > 250


def test_an_example_that_is_not_valid_is_found(reference):
    part = next(part for part in reference.parts() if part.cls.__name__ == "TrainerSection")
    assert reference.problems(part, "epochs", "many")
    assert not reference.problems(part, "epochs", 3)


def test_the_table_of_metrics_is_that_of_the_modules(reference):
    assert reference.metrics() in (ROOT / "docs/metrics.md").read_text(), (
        "copy what `metrics` in docs/reference.py returns"
    )


def test_nothing_is_left_over_in_units_and_examples(reference):
    found = {
        name for part in reference.parts() for key, _ in part.fields() for name in (key, f"{part.cls.__name__}.{key}")
    }
    assert {*reference.UNITS, *reference.EXAMPLES} - found == set()


def test_the_page_has_every_key_and_links_that_lead_somewhere(reference):
    text = reference.markdown()
    anchors = set(re.findall(r"\{#([\w.-]+)\}", text))
    assert len(anchors) == text.count("{#")
    assert set(re.findall(r"\]\(#([\w.-]+)\)", text)) <= anchors
    assert not re.search(r"\| (list of |mapping of names to )?sections?\b", text)  # each is a link
    for part in reference.parts():
        assert all(f"| `{key}` |" in text for key, _ in part.fields())
    metrics = set(re.findall(r"^\| `([\w-]+)` \|", reference.metrics(), re.MULTILINE))
    assert {"rmse", "acc", "fair-crps", "spread-error"} <= metrics


# ---- the site ------------------------------------------------------------------------------------------------------


class Loaded(HTMLParser):
    """Addresses that a browser loads with a page."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag in ("script", "img", "iframe", "source") or (
            tag == "link" and given.get("rel") in ("stylesheet", "preconnect")
        ):
            self.found += [given[key] for key in ("src", "href") if given.get(key)]


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if page not in text} == set()


def test_the_workflow_builds_what_make_builds():
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "docs.yml").read_text())["jobs"]["site"]["steps"]
    assert "make docs" in [step.get("run") for step in steps]
    known(["make", "docs"])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any("docs" in needed for needed in extras["dev"])


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("material", reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        reader = Loaded()
        reader.feed(page.read_text())
        assert [address for address in reader.found if "//" in address] == [], page
