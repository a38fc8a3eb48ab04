"""Hooks of the site (`mkdocs.yml`): one text for GitHub and for the site.

Pages link to files as GitHub shows them: `../README.md`, `../core/views.py`. The site has those
files too. The texts at the top level are pages under `project/`, and each other file that a page
names is a page under `source/`. A link to a file that does not exist is a warning, hence an error.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: Texts at the top level → their pages.
TEXTS = {
    f"{name}.md": f"project/{name.lower()}.md"
    for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")
}
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".yml": "yaml", ".md": "markdown"}
#: A fence of code, which is left alone, or the target of a link or picture.
LINK = re.compile(r"(?ms)^(?P<fence> *(?:```|~~~).*?^ *(?:```|~~~) *$)|\]\((?P<target>[^()\s]+)\)")
#: What only the tests read, see tests/pages.py: comments that are run, and how a fence runs. A
#: title is shown.
TESTED = re.compile(r"(?ms)^<!-- (?:python|bash)\b.*?^-->\n|(?P<fence>^ *```\w+)(?P<how> [^\n]*)$")
#: On the site the home page begins as README.md does, up to its first heading; GitHub shows what
#: stands between these marks.
FIRST_SCREEN = ("<!-- first screen: begin -->", "<!-- first screen: end -->")
#: Source files are not searched: a search for a name shall find its description.
_HIDDEN = "---\ntitle: {}\nsearch:\n  exclude: true\n---\n\n"
log = logging.getLogger("mkdocs.hooks.links")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the texts of the top level, and every file that a page names."""
    for text, page in TEXTS.items():
        if (ROOT / text).exists():
            files.append(File.generated(config, page, content=(ROOT / text).read_text()))
    pages = list(files.documentation_pages())
    while pages:
        for path in _named(pages.pop()):
            if (ROOT / path).exists() and files.get_file_from_path(site_path(path)) is None:
                shown = _source(config, path)
                files.append(shown)
                pages.append(shown)
    return files


#: Pages that are looked up come last in a search.
LAST = ("evidence.md", "project/changelog.md")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links to their pages, and leave out what only the
    tests read."""
    if page.file.src_uri in LAST:
        page.meta["search"] = {"boost": 0.2}
    own = repository_path(page.file.src_uri)
    if own is None:
        return markdown
    before, begin, rest = _rewritten(markdown, own, page.file.src_uri).partition(FIRST_SCREEN[0])
    if begin:
        readme = (ROOT / "README.md").read_text()
        first = readme.partition("\n## ")[0].partition("\n")[2]
        rest = (
            _rewritten(first, "README.md", page.file.src_uri) + rest.partition(FIRST_SCREEN[1])[2]
        )
    return before + rest


def _rewritten(markdown: str, own: str, page: str) -> str:
    """A text of the repository as it stands on a page of the site."""

    def rewritten(found: re.Match[str]) -> str:
        path = _path(own, found["target"])
        if path is None:
            return found[0]
        if not (ROOT / path).exists():
            log.warning(f"{own} links to {path}, which does not exist")
            return found[0]
        _, hash_, anchor = found["target"].partition("#")
        to = posixpath.relpath(site_path(path), posixpath.dirname(page) or ".")
        return f"]({to}{hash_}{anchor})"

    return LINK.sub(rewritten, TESTED.sub(_for_readers, markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Docstrings name pages by their paths: in the reference these are links."""
    if not page.file.src_uri.startswith("reference/"):
        return html

    def link(found: re.Match[str]) -> str:
        file = files.get_file_from_path(found[1])
        if file is None:
            log.warning(
                f"a docstring on {page.file.src_uri} names {found[0]}, which does not exist"
            )
            return found[0]
        return f'<a href="{file.url_relative_to(page.file)}">{found[0]}</a>'

    return re.sub(r"(?<![\w/\"])docs/([\w/-]+\.md)", link, html)


def _for_readers(found: re.Match[str]) -> str:
    if found["fence"] is None:
        return ""
    title = re.search(r' title="[^"]*"', found["how"])
    return found["fence"] + (title[0] if title else "")


def repository_path(page: str) -> str | None:
    """Where the text of a page stands in the repository; None for a page of code."""
    if page.startswith("source/"):
        return page.removeprefix("source/").removesuffix(".md") if page.endswith(".md.md") else None
    texts = {ours: text for text, ours in TEXTS.items()}
    return texts.get(page, f"docs/{page}")


def site_path(path: str) -> str:
    """Where a file of the repository stands among the sources of the site."""
    if path in TEXTS:
        return TEXTS[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    return f"source/{path}.md" if _is_text(path) else f"source/{path}"


def _named(file: File) -> Iterator[str]:
    """The files of the repository to which a page links."""
    own = repository_path(file.src_uri)
    if own is None or not file.src_uri.endswith(".md"):
        return
    for found in LINK.finditer(file.content_string):
        path = _path(own, found["target"])
        if path is not None and not path.startswith("docs/") and path not in TEXTS:
            yield path


def _path(page: str, target: str | None) -> str | None:
    """The file of the repository that a link on a page leads to; None for a fence, an address, or a
    place on the same page."""
    if target is None or re.match(r"[a-z]+:|#", target):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target.partition("#")[0]))


def _is_text(path: str) -> bool:
    return Path(path).suffix in LANGUAGES or Path(path).suffix == ""


def _source(config: MkDocsConfig, path: str) -> File:
    """The page of a source file, or of a folder."""
    there = ROOT / path
    if there.is_dir():
        rows = "".join(
            f"- `{each.name}`\n"
            for each in sorted(there.iterdir())
            if not each.name.startswith((".", "__p"))
        )
        return File.generated(config, site_path(path), content=_page(path, rows))
    if not _is_text(path):
        return File.generated(config, site_path(path), abs_src_path=str(there))
    if there.suffix == ".md":
        return File.generated(
            config, site_path(path), content=f"{_HIDDEN.format(path)}{there.read_text()}"
        )
    code = f"~~~~{LANGUAGES.get(there.suffix, 'text')}\n{there.read_text().rstrip()}\n~~~~\n"
    return File.generated(config, site_path(path), content=_page(path, code))


def _page(path: str, body: str) -> str:
    return f"{_HIDDEN.format(path)}# {path}\n\n{body}"
