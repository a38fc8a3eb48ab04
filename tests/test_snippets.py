"""Snippets on every page: Python parses, what it names is there, and what it calls takes the arguments that it gives; so do commands. Programs are run where
their page is tested."""

import ast
import contextlib
import importlib
import inspect
import io
import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer
from torch.distributed.run import get_args_parser
from typer.core import TyperGroup

from gradwire.cli.app import app
from tests.launch import ROOT
from tests.pages import blocks, expected_output, run_blocks
from tests.shell import command_lines

PAGES = sorted(str(path.relative_to(ROOT)) for path in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
#: In the order in which a name that no snippet imports is looked for: fragments leave imports out. Some names are in both backends.
ROOMS = ("gradwire", "gradwire.torch_backend", "gradwire.jax_backend", "gradwire.testing")


def named(node: ast.expr, imported: dict[str, Any]) -> list[Any]:
    """What an expression like `gradwire.plan` or `PowerSGD` may be: one thing, or one of each backend; nothing if it is none of ours.

    Raises:
        AttributeError: there is no such name in a module of ours.
    """
    if isinstance(node, ast.Name):
        if node.id in imported:
            return [imported[node.id]]
        rooms = [importlib.import_module(room) for room in ROOMS]
        return [getattr(room, node.id) for room in rooms if node.id in room.__all__]
    if isinstance(node, ast.Attribute):
        owners = [x for x in named(node.value, imported) if inspect.ismodule(x)]
        return [getattr(owner, node.attr) for owner in owners if owner.__name__.startswith("gradwire")]
    return []


def imports_of(tree: ast.AST) -> dict[str, Any]:
    """What the imports of a snippet bind, as far as it is ours. Whatever else it binds is not ours: None."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "gradwire":
            module = importlib.import_module(node.module)
            for alias in node.names:
                found[alias.asname or alias.name] = getattr(module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "gradwire":
                    module = importlib.import_module(alias.name)
                    found[alias.asname or "gradwire"] = module if alias.asname else importlib.import_module("gradwire")
                else:
                    found[alias.asname or alias.name.split(".")[0]] = None
        elif isinstance(node, ast.ImportFrom):
            found |= dict.fromkeys((alias.asname or alias.name for alias in node.names), None)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = None
        elif isinstance(node, ast.arg):
            found[node.arg] = None
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = None
    return found


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, list[Callable[..., Any]]]]:
    imported = imports_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            named(node, imported)  # it is there
        if isinstance(node, ast.Call):
            found = [x for x in named(node.func, imported) if callable(x)]
            if found:
                yield node, found


def fits(call: ast.Call, function: Callable[..., Any]) -> bool:
    if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
        return True
    try:
        inspect.signature(function).bind(*call.args, **{str(k.arg): k.value for k in call.keywords})
    except TypeError:
        return False
    return True


#: It imports Lightning and transformers.
SLOW = "docs/integrations.md"


@pytest.mark.parametrize("page", [pytest.param(page, marks=pytest.mark.slow if page == SLOW else ()) for page in PAGES])
def test_what_a_snippet_names_is_there_and_takes_its_arguments(page: str) -> None:
    for block in blocks((ROOT / page).read_text()):
        for call, functions in calls(ast.parse(block)):
            assert any(fits(call, function) for function in functions), f"{page}: {ast.unparse(call)}"


def test_a_snippet_that_does_not_fit_is_noticed() -> None:
    for wrong in ("PowerSGD(ranks=4)", "import gradwire as g\ng.plan()", "TwoLevel()"):
        ((call, functions),) = calls(ast.parse(wrong))
        assert not any(fits(call, function) for function in functions), wrong
    with pytest.raises(AttributeError):
        list(calls(ast.parse("import gradwire\ngradwire.power_sdg(4)")))


def test_the_plan_of_two_levels_is_what_the_page_shows() -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run_blocks("two-levels", [7], {})
    assert said.getvalue().endswith(expected_output("two-levels", 7))


# --- commands ---


def commands(text: str) -> list[list[str]]:
    """The lines of blocks of bash, and what stands in the text as a command, as words; environment and comments left out."""
    lines = command_lines("\n".join(blocks(text, "bash")))
    inline = re.findall(r"`((?:make|python|gradwire|torchrun) [^`\n]*)`", text)
    words = [shlex.split(line, comments=True) for line in [*lines, *inline] if "…" not in line]
    return [[*itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), each)] for each in words]


def require_command(words: list[str]) -> None:
    """That what the words ask for is there: the target, the script, and every option."""
    match words:
        case ["make", target, *variables]:
            for known in (f"{target}:", *(f"{variable.split('=')[0]} \\?=" for variable in variables)):
                assert re.search(rf"^{known}", (ROOT / "Makefile").read_text(), re.MULTILINE), words
        case ["python", script, *options] if "/" in script:
            assert (ROOT / script).exists(), words
            # A folder is a program, and some scripts share their options with others beside them.
            sources = [path.read_text() for path in (ROOT / script.removesuffix(".py")).parent.rglob("*.py")]
            for option in options:
                name = option.split("=")[0]
                assert not name.startswith("--") or any(f'"{name}"' in source for source in sources), words
        case ["gradwire", name, *options]:
            command = typer.main.get_command(app)
            assert isinstance(command, TyperGroup)
            assert name in command.commands, words
            known = {option for parameter in command.commands[name].params for option in parameter.opts}
            assert {word for word in options if word.startswith("-")} <= known | {"--help"}, words
        case ["torchrun", *options]:
            run = get_args_parser().parse_args([re.sub(r"\$\w+", "1", word) for word in options])
            if run.no_python:
                require_command([run.training_script, *run.training_script_args])
            elif "/" in run.training_script:
                require_command(["python", run.training_script, *run.training_script_args])


@pytest.mark.parametrize("page", PAGES)
def test_what_a_command_asks_for_is_there(page: str) -> None:
    for words in commands((ROOT / page).read_text()):
        require_command(words)


def test_a_command_that_is_not_there_is_noticed() -> None:
    for wrong in (
        "make tests",
        "make test ARG=tests/core",
        "python benchmarks/zero.py --repetitions 25",
        "torchrun --nproc-per-node=2 examples/train_torch.py --go-on",
        "python benchmarks/zeros.py",
        "torchrun --nproc-per-node=2 examples/train.py",
        "gradwire measure",
        "torchrun --no-python gradwire probe --outputs x",
    ):
        with pytest.raises(AssertionError):
            require_command(wrong.split())
