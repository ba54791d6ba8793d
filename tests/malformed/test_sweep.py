"""A silly value of the right type for any key: `check` and the command that it concerns give the same answer, never a traceback."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.malformed import sweep


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    sweep.prepare(folder)
    return folder


@pytest.mark.slow
def test_every_variant_is_accepted_without_a_change(folder) -> None:
    for name, variant in sweep.variants(folder).items():
        assert sweep.base(variant, folder).to_dict(), name


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, pytest.param(None, marks=[pytest.mark.long, pytest.mark.timeout(14400)])])
def test_check_knows_what_a_command_refuses(folder, count) -> None:
    """There are nearly a thousand cases of about two seconds each."""
    every, fields = sweep.variants(folder), list(sweep.fields_of(folder))
    random.Random(0).shuffle(fields)
    # All cases, or one of each of a few keys: finding out which values are valid takes most of the time.
    chosen = itertools.chain(*(itertools.islice(field.cases(), None if count is None else 1) for field in fields))
    wrong = []
    for number, (case, tree) in enumerate(itertools.islice(chosen, count)):
        if problem := sweep.disagreement(sweep.ask(number, tree, every[case.variant], folder)):
            wrong.append(f"{case}: {problem}")
    assert not wrong, "\n\n".join(wrong)
