"""Hooks of mkdocs (see mkdocs.yml): generated pages, and links from pages to files of the repository.

The site is complete in itself: a file that a page links to becomes a page of the site, below `repository/`. Markdown files
are shown as pages, others as code; a folder lists its Python files.
"""

from __future__ import annotations

import importlib.util
import os
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ALWAYS = (*sorted((ROOT / "models").glob("*/card.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md")
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".yml": "yaml", ".cff": "yaml"}


def script(name: str) -> ModuleType:
    """Return a script of this folder as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def address(path: Path) -> str:
    """Return the place in the site of a file or folder of the repository."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    if path.suffix == ".ipynb":
        return f"gallery/{path.stem}.md"
    inside = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"repository/{inside}/index.md"
    return f"repository/{inside}" if path.suffix == ".md" else f"repository/{inside}.md"


def targets(text: str, folder: Path) -> Iterator[tuple[re.Match[str], Path]]:
    """Yield the links of a page in `folder` that lead to files of the repository, with those files."""
    for match in LINK.finditer(text):
        path = Path(os.path.normpath(folder / match[1]))
        if "://" not in match[1] and path.is_relative_to(ROOT) and path.exists():
            yield match, path


def rewritten(text: str, source: Path) -> str:
    """Return the text of a file of the repository with its links as they are in the site."""
    here, parts, end = posixpath.dirname(address(source)), [], 0
    for match, path in targets(text, source.parent):
        link = posixpath.relpath(address(path), here or ".")
        parts += [text[end : match.start()], f"]({link}{match[2] or ''})"]
        end = match.end()
    return "".join([*parts, text[end:]])


def page(path: Path) -> str:
    """Return the page that shows a file or folder of the repository."""
    if path.suffix == ".md":
        return path.read_text()
    title = f"# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        files = sorted(file for file in path.glob("*.py") if file.stem != "__init__")
        return title + "\n".join(f"- [{file.name}]({file.name})" for file in [*path.glob("__init__.py"), *files])
    return f"{title}~~~~{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n~~~~\n"


def linked() -> dict[str, str]:
    """Return the pages, by their place in the site, of all files outside docs/ that pages link to, however indirectly."""
    pages: dict[str, str] = {}
    waiting = [*DOCS.rglob("*.md"), ROOT / "README.md", *ALWAYS]
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        text = page(source)
        if not source.is_relative_to(DOCS):
            pages[address(source)] = rewritten(text, source if source.is_file() else source / "index.md")
        if source.suffix != ".py":
            folder = source if source.is_dir() else source.parent
            found = {path for _, path in targets(text, folder) if path.suffix not in (".png", ".svg", ".ipynb")} - seen
            waiting += found
            seen |= found
    return pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and those of the files that pages link to."""
    from mkdocs.structure.files import File

    generated = linked() | {"reference.md": script("reference").markdown()}
    for name, text in generated.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: object, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page in docs/ that leave this folder."""
    source = DOCS / page.file.src_uri  # type: ignore[attr-defined]
    return rewritten(markdown, source) if source.is_file() else markdown
