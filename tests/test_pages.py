"""Pages run as they are printed, and print what stands under their blocks; what they name is there."""

import itertools
import re
import shlex
from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from gradwire.cli.app import app
from tests.launch import ROOT
from tests.pages import Block, blocks, chain, differs, outcomes, pages, read


def everywhere() -> Iterator[ParameterSet]:
    """Each block of each page. What starts processes besides one, or has several devices, is slow."""
    for block in (block for page in pages() for block in blocks(page)):
        together = chain(block.page, block.first) if block.first else []
        slow = any(each.language == "bash" or each.says("ranks") or each.says("devices") for each in together)
        yield pytest.param(block, id=f"{block.page}:{block.line}", marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize("block", [*everywhere()])
def test_a_block_runs_and_prints_what_the_page_shows(block: Block) -> None:
    if title := block.says("title"):
        taken = re.compile(rf"\b{re.escape(title)}\b|\b{title.removesuffix('.py')}(?: import\b|:\w)")
        assert any(taken.search(b.code) for b in blocks(block.page) if b.line > block.line), f"nothing takes {title}"
    elif block.first:
        printed, error = outcomes(block.page, block.first)[block.line]
        assert not error, f"{block.page}:{block.line}\n{error}"
        if block.shown is not None:
            assert not differs(printed, block), f"{block.page}:{block.line} prints\n{printed}"
        elif block.language == "python" and not block.hidden:
            assert not printed, f"{block.page}:{block.line} prints what the page does not show:\n{printed}"


def test_what_a_page_shows_is_compared() -> None:
    def shown(expected: str, words: str = "") -> Block:
        (block,) = read("page", f"```python\nf()\n```\n\nIt prints\n\n```text{words}\n{expected}\n```\n")
        return block

    loss = shown("loss 1.25 after 3 steps")
    assert not differs("loss  1.26 after 3 steps\n", loss)
    for other in ("loss 1.27 after 3 steps", "loss 1.25 after 4 steps", "loss 1.25 after 3 steps\nTraceback", ""):
        assert differs(other, loss)
    assert not differs("all 0.5 µs in 30%\nend", shown("all 181 µs in 21%\nend", " varies"))
    assert differs("some 0.5 µs in 30%\nend", shown("all 181 µs in 21%\nend", " varies"))
    assert not differs("much\nmore\n29.3 ms", shown("…\n29.3 ms"))
    assert differs("much\nmore\n29.3 s", shown("…\n29.3 ms"))


def test_blocks_are_read() -> None:
    page = '```python ranks=2\na\n```\n```text\nshown\n```\n<!-- python continues\nb\n-->\n- item\n\n  ```bash not-run="why"\n  c\n  ```\n'
    first, second, third = read("page", page)
    assert (first.line, first.code, first.says("ranks"), first.shown) == (1, "a\n", "2", "shown\n")
    assert (second.line, second.code, second.first, second.hidden) == (7, "b\n", 1, True)
    assert (third.line, third.code, third.first, third.says("not-run")) == (12, "c\n", 0, "why")
    (changed,) = read("page", "```diff\n-old = 1\n+new = 1\n if new:\n+    pass\n```\n")
    assert (changed.language, changed.code) == ("python", "\nnew = 1\nif new:\n    pass\n")
    for wrong in [
        "python rank=2",
        "python continues",
        "py",
        "python ranks=two",
        "bash not-run",
        'python not-run="why"',
    ]:
        with pytest.raises(ValueError, match="page:1"):
            read("page", f"```{wrong}\n```\n")
    with pytest.raises(ValueError, match="does not end"):
        read("page", "```python\na\n")


def commands(page: str) -> list[list[str]]:
    """The lines of blocks of bash, and what stands in the text as a command, as words; environment and comments left out."""
    code = "\n".join(block.code for block in blocks(page) if block.language == "bash" and not block.hidden)
    inline = re.findall(r"`((?:make|python|gradwire|torchrun) [^`\n]*)`", (ROOT / page).read_text())
    lines = [*re.sub(r"\\\n\s*", "", code).splitlines(), *inline]
    words = [shlex.split(line, comments=True) for line in lines if "…" not in line and line.count("'") != 1]
    return [[*itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), each)] for each in words]


def require_command(words: list[str]) -> None:
    """That what the words ask for is there: the target, the script, and every option."""
    match words:
        case ["make", target, *variables]:
            known = [f"{target}:", *(f"{variable.split('=')[0]} \\?=" for variable in variables)]
            assert all(re.search(rf"^{each}", (ROOT / "Makefile").read_text(), re.MULTILINE) for each in known), words
        case ["python", script, *options] if "/" in script:
            assert (ROOT / script).exists(), words
            # A folder is a program, and some scripts share their options with others beside them.
            source = "".join(path.read_text() for path in (ROOT / script.removesuffix(".py")).parent.rglob("*.py"))
            named = [option.split("=")[0] for option in options if option.startswith("--")]
            assert all(f'"{name}"' in source for name in named), words
        case ["gradwire", name, *options]:
            said = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}, color=False)
            assert said.exit_code == 0, words
            assert all(word in said.output for word in options if word.startswith("-")), words
        case ["torchrun", *options]:
            run = get_args_parser().parse_args([re.sub(r"\$\w+", "1", word) for word in options])
            require_command([*([] if run.no_python else ["python"]), run.training_script, *run.training_script_args])


@pytest.mark.parametrize("page", pages())
def test_commands_and_files_that_a_page_names_are_there(page: str) -> None:
    for words in commands(page):
        require_command(words)
    folders = "core|torch_backend|jax_backend|tests|examples|benchmarks"
    for path in re.findall(rf"\b(?:{folders})/[\w/]+\.py\b", (ROOT / page).read_text()):
        assert (ROOT / path).exists() or "/your_" in path, path


@pytest.mark.parametrize(
    "wrong",
    [
        *("make tests", "make test ARG=tests/core", "python benchmarks/zero.py --repetitions 25", "gradwire measure"),
        *("torchrun --nproc-per-node=2 examples/train_torch.py --go-on", "python benchmarks/zeros.py"),
        *("torchrun --nproc-per-node=2 examples/train.py", "torchrun --no-python gradwire probe --outputs x"),
    ],
)
def test_a_command_that_is_not_there_is_noticed(wrong: str) -> None:
    with pytest.raises(AssertionError):
        require_command(wrong.split())


def test_the_messages_in_troubleshooting_are_those_of_the_code() -> None:
    sources = [
        path.read_text() for room in ("core", "torch_backend", "jax_backend") for path in (ROOT / room).rglob("*.py")
    ]
    code = re.sub(r'"\s+f?"', "", "\n".join(sources))  # messages are written over several lines
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/how-to/troubleshooting.md").read_text(), re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 15
    missing = [message for message in messages if message not in code]
    assert not missing, f"the page quotes what no code says: {missing}"
