"""The wheel has everything that a user without a checkout needs."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_holds_the_zoo_the_sites_and_the_page_of_reports(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("credit_like-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {path for folder in ("models", "config/site") for path in (ROOT / folder).rglob("*") if path.is_file()}
    assert {f"credit_like/_shipped/{path.relative_to(ROOT)}" for path in shipped} <= names
    data = {path for path in (ROOT / "credit_like").rglob("*") if path.suffix in (".yml", ".html", ".js", ".css")}
    assert {str(path.relative_to(ROOT)) for path in data} <= names
    environment = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(environment)
    program = (
        "from credit_like.schema import sites, shipped; import credit_like; print(credit_like.__file__);"
        "print(sorted(sites.profiles())); print(shipped.shipped_file('models/wxformer-1deg/model.yml'))"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={"PYTHONPATH": str(environment)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert str(environment) in run.stdout
    assert "derecho" in run.stdout
    assert "_shipped/models/wxformer-1deg/model.yml" in run.stdout
