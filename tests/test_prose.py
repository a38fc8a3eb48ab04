"""Pages are short, say nothing twice, and open with the code of their commonest use."""

import itertools
import re
from collections import Counter

import pytest

from tests.launch import ROOT
from tests.pages import pages

#: Words on a page, code and tables too. The reference, the ledger of what was measured and the
#: history are looked up, not read.
LIMIT = 2500
LOOKED_UP = ("docs/reference/", "docs/evidence.md", "CHANGELOG.md")
#: Words before the first code. Other pages have none, or explain how gradwire itself is built.
OPENING = 125
WITHOUT_CODE = (
    *LOOKED_UP,
    "SECURITY.md",
    "docs/architecture.md",
    "docs/how-to/glossary.md",
    "docs/how-to/questions.md",
)
#: A sentence of so many words is no heading and no name.
SENTENCE = 8
FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)


def shown(page: str) -> str:
    """The text of a page without what only tests read."""
    return re.sub(r"<!--.*?-->", "", (ROOT / page).read_text(), flags=re.DOTALL)


def sentences(text: str) -> list[str]:
    """Of paragraphs, points and cells, without pictures and code."""
    prose = re.sub(r"!\[[^]]*\]|\]\([^)]*\)", "", FENCE.sub("", text))
    parts = re.split(r"\n\s*\n|\n(?= *[-|] |#)|\|", prose)
    found = (s for part in parts for s in re.split(r"(?<=[.!?:])\s+", " ".join(part.split())))
    plain = (re.sub(r"[^\w %]", "", sentence).strip().lower() for sentence in found)
    return [each for each in plain if len(each.split()) >= SENTENCE]


@pytest.mark.parametrize("page", pages())
def test_a_page_is_short_and_opens_with_code(page: str) -> None:
    text = shown(page)
    if not page.startswith(LOOKED_UP):
        assert len(text.split()) <= LIMIT, (
            "divide it, or move what was measured to docs/evidence.md"
        )
    if not page.startswith(WITHOUT_CODE):
        before = text[: (FENCE.search(text) or pytest.fail("no code")).start()]
        assert len(before.split()) <= OPENING, "words before the first code"


def test_what_comes_before_the_first_heading_fills_one_screen() -> None:
    """Of 1,400 by 900 pixels, in which it was looked at when it was so long: five lines of code,
    one picture, one table, and few words."""
    first = shown("README.md").partition("\n## ")[0]
    (code,) = FENCE.findall(first)
    prose = re.sub(r"^\|.*\n|^!.*\n|\]\([^)]*\)", "", FENCE.sub("", first), flags=re.MULTILINE)
    lines = code.splitlines()[1:-1]
    assert len(lines) <= 5
    assert max(map(len, lines)) <= 105
    assert len(re.findall(r"^\|", first, re.MULTILINE)) <= 7
    assert len(re.findall(r"^!\[", first, re.MULTILINE)) == 1
    assert len(prose.split()) <= 85
    assert {"unregister()", "Auto()"} <= {*re.findall(r"\w+\(\)", code)}
    assert "Do not use it" in prose


def test_nothing_is_said_twice() -> None:
    said = Counter(itertools.chain.from_iterable(sentences(shown(page)) for page in pages()))
    assert not [sentence for sentence, times in said.items() if times > 1]
    twice = sentences(
        "One is said here, and it is long enough.\n\n- a\n- *One* is said here,\n  and it is long enough."
    )
    assert len(twice) == 2
    assert len({*twice}) == 1
