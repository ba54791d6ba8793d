"""Every benchmark finds what it imports. They run for minutes, so that most are not run by the tests."""

import ast
import importlib
import importlib.util
import multiprocessing
import os
import runpy
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_what_a_benchmark_imports_from_the_package_is_there(path):
    """Also within functions."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("credit_like"):
            module = importlib.import_module(node.module)
            missing = [
                a.name for a in node.names if not hasattr(module, a.name) and not _is_module(node.module, a.name)
            ]
            assert not missing, f"line {node.lineno}: {node.module} has no {', '.join(missing)}"


def _is_module(package, name):
    return importlib.util.find_spec(f"{package}.{name}") is not None


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in FILES if len(path.parts) == 2], ids=str)
def test_it_starts_as_make_bench_starts_it(path, tmp_path):
    """In a process forked from this one, in which torch is loaded already."""
    printed = tmp_path / "printed"
    process = multiprocessing.get_context("fork").Process(target=_help, args=(path, printed))
    process.start()
    process.join()
    assert process.exitcode == 0, printed.read_text()
    assert printed.read_text().startswith("usage:")


def _help(path, printed):
    with printed.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
    os.chdir(ROOT)
    warnings.resetwarnings()  # outside the tests, a warning of torch's own is no error
    sys.argv, sys.path[:0] = [str(path), "--help"], [str((ROOT / path).parent)]
    runpy.run_path(str(path), run_name="__main__")
