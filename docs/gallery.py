"""Execute notebooks and store them with their results as pages of the site: `python docs/gallery.py [NOTEBOOK…]`.

The site is built from the stored pages, so that building it executes nothing. A test compares their code with the notebooks.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "docs" / "gallery"


def execute(path: Path) -> nbformat.NotebookNode:
    """Return a notebook with its outputs; of a table or data set, the plain text alone."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=3600, coalesce_streams=True, resources=resources).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop("text/html", None)
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted((ROOT / "notebooks").glob("*.ipynb")))
    for path in parser.parse_args().notebooks:
        files = {"output_files_dir": f"{path.stem}_files"}
        text, resources = MarkdownExporter().from_notebook_node(execute(path), files)
        text = re.sub(r"\x1b\[[0-9;]*m", "", re.sub(r"/tmp/tmp\w+", "/tmp/run", text))
        (GALLERY / f"{path.stem}.md").write_text("\n".join(line.rstrip() for line in text.splitlines()).strip() + "\n")
        (GALLERY / files["output_files_dir"]).mkdir(exist_ok=True)
        for name, data in resources["outputs"].items():
            (GALLERY / name).write_bytes(data)


if __name__ == "__main__":
    main()
