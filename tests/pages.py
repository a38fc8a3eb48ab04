"""Pages as their readers follow them: files are written, programs run, commands started, and what they print is what stands under them.

On pages that are followed as a whole a block of Python with a `title` is a file. One without is a program, which may import the files above it; one of
`py` is a fragment, and a test of its own runs it. A `torchrun` line in a block of bash starts a file. A block of text after a program or a command is
what that prints.

Tests take other blocks by number, `run_blocks("state", [0, 1], names)`, and commands by the number of their line, `command("choosing", 2)` of
tests/shell.py. Those calls are the list of what is run, and tests/test_all_is_run.py compares it with the pages. So page and numbers are written out in
them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forked import run_ranks
from tests.launch import ROOT, end_all, environment, free_port, quickly_compiled, torchrun, xla_flags

#: What it is indented by, its language, options and body.
BLOCK = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^torchrun --standalone --nproc-per-node=(\d+) (\S+\.py)$", re.MULTILINE)
#: Started once on each of two machines: with NODE, HEAD and PORT.
ON_EACH = re.compile(r"^(?:torchrun|python) .*\$NODE.*$", re.MULTILINE)
#: Runs programs one after the other, each in a namespace of its own, and prints what each has printed as JSON: frameworks are loaded once for a page.
RUN = """
import contextlib, io, json, sys, traceback
printed = []
for path in sys.argv[1:]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(open(path).read(), path, "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc(file=out)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


@dataclass
class Step:
    """What a reader does: `code` is a program; or a file that `ranks` processes run; or a command on each of two machines. `expected` is what stands
    under it, None for nothing."""

    code: str
    ranks: int = 0
    on_each: bool = False
    expected: str | None = None


def blocks(text: str, language: str = "python") -> list[str]:
    """All blocks of a language, in order. Those of `py` are Python."""
    languages = {"python": ("python", "py")}.get(language, (language,))
    return [textwrap.dedent(body) for _, each, _, body in BLOCK.findall(text) if each in languages]


def path_of(page: str) -> Path:
    """Of `"state"` or `"tutorials/jax"` in docs/; of `"README"`."""
    path = ROOT / "docs" / f"{page}.md"
    return path if path.exists() else ROOT / f"{page}.md"


def block(page: str, number: int, language: str = "python", instead: Mapping[str, str] | None = None) -> str:
    """One block of a page, in which other words stand `instead` of some."""
    return replaced(page, blocks(path_of(page).read_text(), language)[number], instead)


def replaced(page: str, text: str, instead: Mapping[str, str] | None) -> str:
    """A text of a page, in which other words stand `instead` of some.

    Raises:
        AssertionError: it has none of the words.
    """
    for words, others in (instead or {}).items():
        assert words in text, f"{page}.md has no {words!r} any more in\n{text}"
        text = text.replace(words, others)
    return text


def run_blocks(
    page: str, numbers: Iterable[int], names: dict[str, Any], instead: Mapping[str, str] | None = None
) -> None:
    """Run these blocks of Python of a page, see `block`, where these names are bound; they bind more. Words to be replaced may be in any of them."""
    texts = [block(page, number) for number in numbers]
    for words, others in (instead or {}).items():
        assert any(words in text for text in texts), f"{page}.md has no {words!r} any more"
        texts = [text.replace(words, others) for text in texts]
    for text in texts:
        exec(compile(text, f"{page}.md", "exec"), names)


def expected_output(page: str, number: int) -> str:
    """The block of text after this block of Python."""
    after = path_of(page).read_text()
    found = [match for match in BLOCK.finditer(after) if match[2] in ("python", "py")][number]
    following = BLOCK.search(after, found.end())
    assert following is not None
    assert following[2] == "text", f"{page}.md does not show what its block {number} of Python prints"
    return textwrap.dedent(following[4])


def public_names(*modules: Any) -> dict[str, Any]:
    """What these modules are imported for, under its names."""
    return {name: getattr(module, name) for module in modules for name in module.__all__}


def read(text: str, folder: Path) -> list[Step]:
    """Write the files of a page to a folder, and return its programs and commands."""
    steps: list[Step] = []
    last: Step | None = None
    for _, language, options, body in BLOCK.findall(text):
        title = re.search(r'title="([^"]+)"', options)
        command = COMMAND.search(body) if language == "bash" else None
        if language == "text" and last is not None:
            last.expected = body
            last = None
        elif language == "python" and title:
            (folder / title[1]).write_text(body)
            last = None
        elif language == "bash" and (each := ON_EACH.search(body)):
            last = Step(each[0], on_each=True)
            steps.append(last)
        elif language == "python" or command:
            last = Step(body) if command is None else Step(command[2], ranks=int(command[1]))
            steps.append(last)
        else:
            last = None
    return steps


def printed(steps: list[Step], folder: Path, *, to_the_letter: bool = False) -> list[str]:
    """What each step prints. XLA compiles quickly, and the ranks of torchrun are forked: they find what it would have given them. Where a page is
    followed `to_the_letter`, XLA compiles as for users, and torchrun is run."""
    programs = [step for step in steps if not step.ranks and not step.on_each]
    paths = []
    for i, step in enumerate(programs):
        paths.append(folder / f"program_{i}.py")
        paths[-1].write_text(step.code)
    flags = xla_flags("--xla_force_host_platform_device_count=2")
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags if to_the_letter else quickly_compiled(flags),
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
    }
    outputs: list[str] = []
    if programs:
        done = subprocess.run(
            [sys.executable, "-c", RUN, *map(str, paths)],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        outputs = json.loads(done.stdout.splitlines()[-1])
    found = iter(outputs)
    extra = {"PYTHONPATH": env["PYTHONPATH"]}

    def output(step: Step) -> str:
        if step.on_each:
            return on_two_machines(step.code, folder)
        if not step.ranks:
            return next(found)
        script = folder / step.code
        return torchrun(script, step.ranks, env=extra).stdout if to_the_letter else run_ranks(script, step.ranks)

    return [output(step) for step in steps]


def on_two_machines(command: str, folder: Path, timeout: float = 240) -> str:
    """What the first prints, on its standard output. Both are this machine. No process is left."""
    mark = uuid.uuid4().hex
    env = environment(mark) | {"JAX_PLATFORMS": "cpu", "HEAD": "127.0.0.1", "PORT": str(free_port())}
    env["XLA_FLAGS"] = quickly_compiled(xla_flags("--xla_force_host_platform_device_count=1"))
    run = command.replace("torchrun", f"{sys.executable} -m torch.distributed.run", 1)
    run = re.sub(r"^python", sys.executable, run)
    pipe = subprocess.PIPE
    nodes = [
        subprocess.Popen(
            ["bash", "-c", run], cwd=folder, env=env | {"NODE": str(i)}, stdout=pipe, stderr=pipe, text=True
        )
        for i in range(2)
    ]
    try:
        outputs = [node.communicate(timeout=timeout) for node in nodes]
    finally:
        end_all(mark)
    assert not any(node.returncode for node in nodes), "\n".join(error[-3000:] for _, error in outputs)
    return "".join(line for line in outputs[0][0].splitlines(True) if not line.startswith("[Gloo]"))


def differs(printed: str, expected: str) -> bool:
    """Whether a page says something else than was printed. Numbers with a decimal point may differ by one in the last digit that is shown: a
    processor may round them so."""
    number = re.compile(r"\d+\.\d+")
    if number.sub("0.0", printed).split() != number.sub("0.0", expected).split():
        return True
    pairs = zip(number.findall(printed), number.findall(expected), strict=True)
    return any(abs(float(a) - float(b)) > 1.01 * 10.0 ** -len(b.split(".")[1]) for a, b in pairs)
