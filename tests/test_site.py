"""The documentation site: it builds without a warning, its links lead somewhere, and its reference holds every public name."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.launch import ROOT

REFERENCE = ROOT / "docs" / "reference"
#: Modules whose `__all__` is public → their page.
MODULES = {
    "gradwire": "gradwire",
    "gradwire.jax_backend": "jax_backend",
    "gradwire.testing": "testing",
    "gradwire.torch_backend": "torch_backend",
    "gradwire.torch_backend.integrations": "torch_backend",
}
#: Elements that fetch what their attribute names.
FETCHED = {("img", "src"), ("link", "href"), ("script", "src"), ("iframe", "src"), ("source", "src")}


def described() -> list[str]:
    return [
        name
        for page in sorted(REFERENCE.glob("*.md"))
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    public = {f"{module}.{name}" for name in importlib.import_module(module).__all__}
    missing = sorted(public - set(described()))
    assert not missing, f"add to docs/reference: {missing}"


def test_the_reference_describes_each_name_once_and_none_that_is_gone() -> None:
    names = described()
    assert len(names) == len(set(names))
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), f"{name} is in docs/reference and nowhere else"


class Page(HTMLParser):
    """Where the elements of a page link, what they fetch, and the places they name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if value is None:
                continue
            if key == "id":
                self.places.add(value)
            if (tag, key) in FETCHED:
                self.fetched.append(value)
            elif tag == "a" and key == "href":
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("site")
    subprocess.run(["make", "-s", "build/typed"], cwd=ROOT, check=True, timeout=60)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(out)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.slow
def test_the_site_links_to_what_is_there_and_fetches_nothing(site: Path) -> None:
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 20
    lost = []
    for path, page in pages.items():
        for target in page.fetched + page.links:
            address = urlsplit(target)
            if address.scheme or address.netloc:
                if target in page.fetched:
                    lost.append(f"{path.relative_to(site)} fetches {target}")
                continue
            to = (path.parent / unquote(address.path)).resolve() if address.path else path
            place = unquote(address.fragment)
            if to.is_dir():
                to /= "index.html"
            if not to.exists() or (place and to in pages and place not in pages[to].places):
                lost.append(f"{path.relative_to(site)} → {target}")
    assert not lost, "\n".join(lost)


@pytest.mark.slow
def test_the_reference_is_written_out_and_found(site: Path) -> None:
    for module, its in MODULES.items():
        page = Page((site / "reference" / f"{its}.html").read_text())
        for name in importlib.import_module(module).__all__:
            assert f"{module}.{name}" in page.places, f"{module}.{name} has no place in the reference"
    text = re.sub(r"<[^>]*>", "", (site / "reference" / "gradwire.html").read_text())
    assert re.search(r"^PowerSGD\(\s+rank: .+,\s+\*,", text, re.MULTILINE), (
        "parameters in another order than Python takes them"
    )
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"] for entry in index["docs"]}
    assert "reference/gradwire.html#gradwire.PowerSGD" in found
    assert not any(place.startswith("source/") for place in found)
