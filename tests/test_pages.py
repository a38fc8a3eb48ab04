"""Pages run as they are printed, and print what stands under their blocks; what they, and the
Makefile, name is there; the site that is built of them holds together."""

import html
import importlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from gradwire.cli.app import app
from tests.launch import LIMIT, ROOT
from tests.pages import Block, blocks, chain, differs, outcomes, pages, read
from tests.test_reference import MODULES


def everywhere() -> Iterator[ParameterSet]:
    """Each block of each page. What starts processes besides one, or has several devices, is
    slow."""
    for block in (block for page in pages() for block in blocks(page)):
        together = chain(block.page, block.first) if block.first else []
        slow = any(
            each.language == "bash" or each.says("ranks") or each.says("devices")
            for each in together
        )
        yield pytest.param(
            block, id=f"{block.page}:{block.line}", marks=pytest.mark.slow if slow else ()
        )


@pytest.mark.parametrize("block", [*everywhere()])
def test_a_block_runs_and_prints_what_the_page_shows(block: Block) -> None:
    if title := block.says("title"):
        taken = re.compile(
            rf"\b{re.escape(title)}\b|\b{title.removesuffix('.py')}(?: import\b|:\w)"
        )
        assert any(taken.search(b.code) for b in blocks(block.page) if b.line > block.line), (
            f"nothing takes {title}"
        )
    elif block.first:
        printed, error = outcomes(block.page, block.first)[block.line]
        assert not error, f"{block.page}:{block.line}\n{error}"
        if block.shown is not None:
            assert not differs(printed, block), f"{block.page}:{block.line} prints\n{printed}"
        elif block.language == "python" and not block.hidden:
            assert not printed, (
                f"{block.page}:{block.line} prints what the page does not show:\n{printed}"
            )


def test_blocks_are_read_and_what_they_show_is_compared() -> None:
    page = '```python ranks=2\na\n```\n```text\nshown\n```\n<!-- python continues\nb\n-->\n- item\n\n  ```bash not-run="why"\n  c\n  ```\n'
    first, second, third = read("page", page)
    assert (first.line, first.code, first.says("ranks"), first.shown) == (1, "a\n", "2", "shown\n")
    assert (second.line, second.code, second.first, second.hidden) == (7, "b\n", 1, True)
    assert (third.line, third.code, third.first, third.says("not-run")) == (12, "c\n", 0, "why")
    (changed,) = read("page", "```diff\n-old = 1\n+new = 1\n if new:\n+    pass\n```\n")
    assert (changed.language, changed.code) == ("python", "\nnew = 1\nif new:\n    pass\n")
    unknown = (
        "python rank=2",
        "python continues",
        "py",
        "python ranks=two",
        "bash not-run",
        'python not-run="why"',
    )
    for wrong in [*(f"```{fence}\n```\n" for fence in unknown), "```python\na\n"]:
        with pytest.raises(ValueError, match=r"page:1:|page: .* does not end"):
            read("page", wrong)

    def shown(expected: str, words: str = "") -> Block:
        (block,) = read(
            "page", f"```python\nf()\n```\n\nIt prints\n\n```text{words}\n{expected}\n```\n"
        )
        return block

    loss, some = shown("loss 1.25 after 3 steps"), "all 181 µs in 21%\nend"
    same = [
        ("loss  1.26 after 3 steps\n", loss),
        ("all 0.5 µs in 30%\nend", shown(some, " varies")),
    ]
    same += [("much\nmore\n29.3 ms", shown("…\n29.3 ms"))]
    others = (
        "loss 1.27 after 3 steps",
        "loss 1.25 after 4 steps",
        "loss 1.25 after 3 steps\nTraceback",
        "",
    )
    different = [
        *((other, loss) for other in others),
        ("some 0.5 µs in 30%\nend", shown(some, " varies")),
    ]
    different += [("much\nmore\n29.3 s", shown("…\n29.3 ms"))]
    assert not any(itertools.starmap(differs, same))
    assert all(itertools.starmap(differs, different))


# --- what is named ------------------------------------------------------------------------------

MAKEFILE = (ROOT / "Makefile").read_text()


def commands(page: str) -> list[list[str]]:
    """The lines of blocks of bash, and what stands in the text as a command, as words; environment
    and comments left out."""
    code = "\n".join(
        block.code for block in blocks(page) if block.language == "bash" and not block.hidden
    )
    inline = re.findall(r"`((?:make|python|gradwire|torchrun) [^`\n]*)`", (ROOT / page).read_text())
    lines = [*re.sub(r"\\\n\s*", "", code).splitlines(), *inline]
    words = [
        shlex.split(line, comments=True)
        for line in lines
        if "…" not in line and line.count("'") != 1
    ]
    return [
        [*itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), each)] for each in words
    ]


def require_command(words: list[str]) -> None:
    """That what the words ask for is there: the target, the script, and every option."""
    match words:
        case ["make", target, *variables]:
            known = [f"{target}:", *(f"{variable.split('=')[0]} \\?=" for variable in variables)]
            assert all(re.search(rf"^{each}", MAKEFILE, re.MULTILINE) for each in known), words
        case ["python", script, *options] if "/" in script:
            assert (ROOT / script).exists(), words
            # A folder is a program, and some scripts share their options with others beside them.
            source = "".join(
                path.read_text()
                for path in (ROOT / script.removesuffix(".py")).parent.rglob("*.py")
            )
            named = [option.split("=")[0] for option in options if option.startswith("--")]
            assert all(f'"{name}"' in source for name in named), words
        case ["gradwire", name, *options]:
            said = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}, color=False)
            assert said.exit_code == 0, words
            assert all(word in said.output for word in options if word.startswith("-")), words
        case ["torchrun", *options]:
            run = get_args_parser().parse_args([re.sub(r"\$\w+", "1", word) for word in options])
            require_command(
                [
                    *([] if run.no_python else ["python"]),
                    run.training_script,
                    *run.training_script_args,
                ]
            )


def test_commands_and_files_that_a_page_names_are_there() -> None:
    for page in pages():
        for words in commands(page):
            require_command(words)
        text = (ROOT / page).read_text()
        for path in re.findall(
            r"\b(?:core|torch_backend|jax_backend|tests|examples|benchmarks)/[\w/]+\.py\b", text
        ):
            assert (ROOT / path).exists() or "/your_" in path, f"{page}: {path}"
    for wrong in (
        *(
            "make tests",
            "make test ARG=tests/core",
            "python benchmarks/zero.py --repetitions 25",
            "gradwire measure",
        ),
        *(
            "torchrun --nproc-per-node=2 examples/train_torch.py --go-on",
            "python benchmarks/zeros.py",
        ),
        *(
            "torchrun --nproc-per-node=2 examples/train.py",
            "torchrun --no-python gradwire probe --outputs x",
        ),
    ):
        with pytest.raises(AssertionError):
            require_command(wrong.split())


def test_the_messages_in_troubleshooting_are_those_of_the_code() -> None:
    files = [
        path
        for room in ("core", "torch_backend", "jax_backend")
        for path in (ROOT / room).rglob("*.py")
    ]
    # messages take several lines
    code = re.sub(r'"\s+f?"', "", "\n".join(path.read_text() for path in files))
    rows = re.findall(
        r"^\| (`.*?) \|", (ROOT / "docs/how-to/troubleshooting.md").read_text(), re.MULTILINE
    )
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 15
    assert not [message for message in messages if message not in code], (
        "the page quotes what no code says"
    )


def test_each_target_of_make_sets_up_by_itself_what_it_runs() -> None:
    for name, needs, recipe in re.findall(r"^([\w-]+):(.*)\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE):
        assert "$(BIN)" not in recipe or "$(READY)" in needs + recipe, name
        if "$(READY)" in needs and "$(MAKE)" not in recipe:  # which would be run, not printed
            # -W: as if the constraints had just changed, so the set-up must be among what would be
            # done.
            command = ["make", "-n", "-W", "constraints.txt", name, "ARGS=tests/core -k views"]
            set_up, ran = subprocess.check_output(command, cwd=ROOT, text=True).split(
                "touch .venv/ready\n"
            )
            assert "pip install --no-compile -q -c constraints.txt torch==2.13.0" in set_up
            assert ".venv/bin/" in ran
            assert "$(ARGS)" not in recipe or "tests/core -k views" in ran, name


def test_what_targets_run_is_there_and_is_in_a_test_and_ci_runs_all_tests() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    run = re.findall(r"python (?:-m )?((?:benchmarks|examples|tests)[/.][\w./]+)", MAKEFILE)
    assert len(run) > 15
    for what in run:
        path = what.removesuffix(".py").replace(".", "/")
        assert (ROOT / f"{path}.py").exists() or (ROOT / path / "__main__.py").exists(), what
        # They take shaped links for minutes, and other Pythons with gigabytes of packages.
        if what not in ("benchmarks/advice/readme.py", "tests.versions"):
            assert re.search(rf"\b{Path(path).name}\b", tests), what
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "set -euo pipefail" in script
    assert "make test-all" in script


# --- the site -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without a warning."""
    out: Path = tmp_path_factory.mktemp("site")
    subprocess.run(["make", "-s", "build/typed"], cwd=ROOT, check=True, timeout=LIMIT)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(out)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.slow
def test_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    """Links, anchors included, are looked at as it is built."""
    texts = [path.read_text() for path in site.rglob("*.html")]
    assert len(texts) > 20
    for text in texts:
        for address in re.findall(
            r'<(?:img|link|script|iframe|source)\b[^>]*?\b(?:src|href)="([^"]*)"', text
        ):
            assert "://" not in address, address


@pytest.mark.slow
def test_the_home_page_begins_as_the_readme_does(site: Path) -> None:
    """With all that is said before the first heading, whose links lead on from there."""
    home, readme = ((site / f"{page}.html").read_text() for page in ("index", "project/readme"))
    first, whole = (re.search(r"(?s)<h1 .*?</h1>(.*?)<h2 ", page)[1] for page in (home, readme))
    text, whole_text = (" ".join(re.sub(r"<[^>]*>", "", part).split()) for part in (first, whole))
    assert text.startswith(whole_text)
    shown = re.findall(r'(?:href|src)="([^"#]*)', first)
    assert any("h100-step.svg" in path for path in shown)
    assert all((site / path).exists() for path in shown)


@pytest.mark.slow
def test_the_reference_is_written_out_and_found_and_nothing_is_shown_that_only_tests_read(
    site: Path,
) -> None:
    pages = {path.stem: path.read_text() for path in (site / "reference").glob("*.html")}
    places = {place for page in pages.values() for place in re.findall(r'\bid="([^"]*)"', page)}
    names = {
        f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__
    }
    assert not names - places, "have no place in the reference"
    assert "gradwire.PowerSGD.alike" not in places, "is for who writes methods"
    shown = {its: html.unescape(re.sub(r"<[^>]*>", "", page)) for its, page in pages.items()}
    assert not [
        its
        for its, text in shown.items()
        if re.search(r"Annotated\[|<object object|OWN_CHECK", text)
    ]
    assert re.search(
        r"^PowerSGD\(\s+rank: [^*]+\s\*,", shown["gradwire"], re.MULTILINE
    )  # in the order in which Python takes them
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    found = {entry["location"] for entry in entries}
    assert "reference/gradwire.html#gradwire.PowerSGD" in found
    titles = [re.sub(r"<[^>]*>", "", entry["title"]).lower() for entry in entries]
    for searched in ("PowerSGD rank", "int8", "FSDP", "slow network", "hang"):
        assert any(all(word in title for word in searched.lower().split()) for title in titles), (
            searched
        )
    assert not any(place.startswith("source/") for place in found)
    assert not re.search(r"tests\.jax\.reader|continues", (site / "local-sgd-jax.html").read_text())
    assert (
        '<span class="filename">train.py</span>' in (site / "tutorials" / "torch.html").read_text()
    )
