"""Every block of Python and every command on every page is run by a test: what tests take from pages is compared with what pages hold.

Tests name what they take, `run_blocks("state", [0, 1], …)`, so this reads their calls. Some pages are followed as a whole.
"""

import ast
import re
from collections.abc import Iterator

from tests.launch import ROOT
from tests.pages import BLOCK, COMMAND, ON_EACH, blocks
from tests.shell import command_lines

#: Functions that run what they are given: a page, and a number or numbers of its blocks, or of its lines of bash.
RUN = {"block", "command", "printed_by", "run_blocks", "run_page"}
#: Followed by tests/test_pages.py and tests/test_readme.py: all their Python but fragments, and the commands that `tests.pages.read` knows.
WHOLE = ("README", "tutorials/", "how-to/")
#: Lines of bash that no test runs, and why.
NOT_RUN = {
    "git clone <this repository> gradwire && cd gradwire": "the tests stand in what it makes",
    "pip install '.[torch]'": "fetches gigabytes; tests/test_packaging.py installs the wheel",
    "pip install '.[jax]'": "the same",
    "make demo": "tests/examples/test_demo.py runs its script with a small model",
    "make check": "these tests, and what checks them",
    "make docs": "tests/test_site.py builds the site",
    "export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2": "tests/pages.py sets both for the page's programs",
}
PLACES = "tests/torch/test_fragments.py, tests/jax/test_fragments.py, tests/test_fragments.py if it needs both, or beside the tests of its subject"

#: A page, "python" or "bash", and a number: of a block of Python, or of a line of bash among all of the page.
Place = tuple[str, str, int]


def pages() -> dict[str, str]:
    """Their texts, by the names that tests give them."""
    docs = {str(p.relative_to(ROOT / "docs").with_suffix("")): p.read_text() for p in (ROOT / "docs").rglob("*.md")}
    return docs | {p.stem: p.read_text() for p in ROOT.glob("*.md")}


def taken_in(source: str, texts: dict[str, str]) -> Iterator[Place]:
    """What a file of tests takes, by calls whose first two arguments are written out."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and len(node.args) > 1):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in RUN:
            continue
        try:
            page, numbers = (ast.literal_eval(argument) for argument in node.args[:2])
            language = ast.literal_eval(node.args[2]) if name == "block" and len(node.args) > 2 else "python"
        except ValueError:  # they are handed on
            continue
        for number in [numbers] if isinstance(numbers, int) else numbers:
            if name == "command":
                yield page, "bash", number
            elif language == "bash":
                yield from ((page, "bash", line) for line in lines_of(texts[page], number))
            elif language == "python":
                yield page, "python", number


def lines_of(text: str, number: int) -> range:
    """The numbers of the lines of a block of bash among all of the page."""
    counts = [len(command_lines(body)) for body in blocks(text, "bash")]
    return range(sum(counts[:number]), sum(counts[: number + 1]))


def taken() -> set[Place]:
    texts = pages()
    calls = re.compile(rf"\b(?:{'|'.join(RUN)})\(")
    sources = [path.read_text() for path in (ROOT / "tests").rglob("*.py") if path.name != "test_all_is_run.py"]
    return {place for source in sources if calls.search(source) for place in taken_in(source, texts)}


def held_by(page: str, text: str) -> Iterator[tuple[Place, str]]:
    """What tests have to take from a page, and how it begins."""
    whole = page.startswith(WHOLE)
    python = [(match[2], match[4]) for match in BLOCK.finditer(text) if match[2] in ("python", "py")]
    for number, (language, body) in enumerate(python):
        if not (whole and language == "python"):
            yield (page, "python", number), body.strip().splitlines()[0]
    for number, line in enumerate(command_lines("\n".join(blocks(text, "bash")))):
        followed = whole and (COMMAND.search(line) or ON_EACH.search(line))
        if not followed and line not in NOT_RUN:
            yield (page, "bash", number), line


def complaints(texts: dict[str, str], found: set[Place]) -> list[str]:
    said = []
    for page, text in texts.items():
        for place, beginning in held_by(page, text):
            if place not in found:
                _, language, number = place
                what, how = (
                    (f"block {number} of Python", f"run_blocks({page!r}, [{number}], names) in {PLACES}")
                    if language == "python"
                    else (f"line {number} of bash", f"command({page!r}, {number}) in tests/test_commands.py")
                )
                said.append(f"{page}: no test runs {what}, {beginning!r}. Run it, by {how}")
    return said


def test_every_block_and_every_command_is_run_by_a_test() -> None:
    said = complaints(pages(), taken())
    assert not said, "\n".join(said)


def test_every_block_says_its_language() -> None:
    """`py` is a fragment on a page that is followed as a whole."""
    for page, text in pages().items():
        fences = len(re.findall(r"^ *```", text, re.MULTILINE))
        languages = [match[2] for match in BLOCK.finditer(text)]
        assert fences == 2 * len(languages), f"{page}: a block does not end, or is indented otherwise than it begins"
        known = {"python", "bash", "text"} | ({"py"} if page.startswith(WHOLE) else set())
        assert set(languages) <= known, f"{page}: name blocks python, bash or text"


def test_what_is_not_run_is_on_a_page() -> None:
    lines = {line for text in pages().values() for line in command_lines("\n".join(blocks(text, "bash")))}
    assert NOT_RUN.keys() <= lines


def test_what_no_test_runs_is_noticed() -> None:
    page = "```python\nfirst()\n```\n\n- Under an item:\n\n  ```python\n  second()\n  ```\n\n```bash\nmake clean\nmake tea\n```\n"
    found = set(taken_in('run_blocks("page", [0], {})\nblock("page", number)\ncommand("page", 0)', {"page": page}))
    assert found == {("page", "python", 0), ("page", "bash", 0)}
    second, tea = complaints({"page": page}, found)
    assert second.startswith(
        "page: no test runs block 1 of Python, 'second()'. Run it, by run_blocks('page', [1], names) in "
    )
    assert (
        tea == "page: no test runs line 1 of bash, 'make tea'. Run it, by command('page', 1) in tests/test_commands.py"
    )
    assert complaints({"tutorials/page": page}, set())[0].startswith("tutorials/page: no test runs line 0 of bash")
    assert set(taken_in('block("page", 0, "bash")', {"page": page})) == {("page", "bash", 0), ("page", "bash", 1)}
