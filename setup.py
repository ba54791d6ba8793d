"""Copy the model zoo and the site profiles into the wheel; everything else about the build is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithShippedFiles(build_py):
    """Add `models/` and `config/site/` to the package as `credit_like/_shipped`."""

    def run(self) -> None:
        """Build the modules, then copy the folders beside them."""
        super().run()
        if not self.editable_mode:
            for folder in ("models", "config/site"):
                target = Path(self.build_lib, "credit_like", "_shipped", folder)
                shutil.copytree(folder, target, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithShippedFiles})
