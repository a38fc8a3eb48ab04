"""The documentation site: it builds without a warning, its links lead somewhere, and its reference is written out."""

import importlib
import json
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.launch import ROOT
from tests.test_reference import MODULES

pytestmark = pytest.mark.slow
LINKS = re.compile(r'<a\b[^>]*?\bhref="([^"]*)"')
FETCHED = re.compile(r'<(?:img|link|script|iframe|source)\b[^>]*?\b(?:src|href)="([^"]*)"')
PLACES = re.compile(r'\bid="([^"]*)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("site")
    subprocess.run(["make", "-s", "build/typed"], cwd=ROOT, check=True, timeout=60)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(out)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_site_links_to_what_is_there_and_fetches_nothing(site: Path) -> None:
    pages = {path: path.read_text() for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 20
    places = {path: {unescape(place) for place in PLACES.findall(text)} for path, text in pages.items()}
    lost = []
    for path, text in pages.items():
        fetched = [*map(unescape, FETCHED.findall(text))]
        for target in [*fetched, *map(unescape, LINKS.findall(text))]:
            address = urlsplit(target)
            away = bool(address.scheme or address.netloc)
            to = (path.parent / unquote(address.path)).resolve() if address.path else path
            to = to / "index.html" if to.is_dir() else to
            place = unquote(address.fragment)
            if target in fetched if away else not to.exists() or (place and to in pages and place not in places[to]):
                lost.append(f"{path.relative_to(site)} → {target}")
    assert not lost, "\n".join(lost)


def test_the_reference_is_written_out_and_found(site: Path) -> None:
    for module, its in MODULES.items():
        places = PLACES.findall((site / "reference" / f"{its}.html").read_text())
        for name in importlib.import_module(module).__all__:
            assert f"{module}.{name}" in places, f"{module}.{name} has no place in the reference"
    text = re.sub(r"<[^>]*>", "", (site / "reference" / "gradwire.html").read_text())
    assert re.search(r"^PowerSGD\(\s+rank: [^*]+\s\*,", text, re.MULTILINE)  # in the order in which Python takes them
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"] for entry in index["docs"]}
    assert "reference/gradwire.html#gradwire.PowerSGD" in found
    assert not any(place.startswith("source/") for place in found)


def test_the_site_shows_nothing_that_only_tests_read(site: Path) -> None:
    text = (site / "local-sgd.html").read_text()
    assert not re.search(r"tests\.jax\.reader|continues", text)
    assert '<span class="filename">train.py</span>' in (site / "tutorials" / "torch.html").read_text()
