"""Every block of every page, found in the page, and run as a reader would run it. What stands after
the language of a fence says how:

    title="train.py"   a file in the folder of the page's blocks, one of which has to name it
    ranks=2            so many processes, as torchrun starts them
    devices=4          so many devices of JAX, in each process
    nodes=2            bash: once on each of so many machines, all of them this one, with its number in NODE
    continues          goes on where the block before ended: the same processes, names and folder
    not-run="why"      bash: is not run; text: is not what the block before prints
    varies             text: its numbers depend on the machine

A comment `<!-- python … -->` or `<!-- bash … -->`, with the same words, is a block that readers do
not see: what they have by then, and what is checked afterwards. Text below a block, without a
heading between, is what that prints; `…` in it stands for anything. A block of `diff` is run as the
Python that it leads to.
"""

import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import textwrap
import traceback
import types
import uuid
import warnings
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tests import launch
from tests.launch import LIMIT, ROOT

FENCE = re.compile(
    r"^(?P<fence> *```)(?P<language>\w*)(?P<how>[^\n]*)\n(?P<code>.*?)^(?P=fence)$"
    r"|^<!-- (?P<hidden>python|bash)(?P<unseen>[^\n]*)\n(?P<setup>.*?)^-->$|^#+ (?P<heading>[^\n]+)$",
    re.MULTILINE | re.DOTALL,
)
_PYTHON = r'( title="[^"]+"| ranks=\d+| devices=\d+| continues)*'
HOW = {"python": _PYTHON, "diff": _PYTHON + '( not-run="[^"]+")?'}
HOW |= {
    "bash": r'( nodes=\d+| continues| not-run="[^"]+")*',
    "text": r'( varies| not-run="[^"]+")*',
}
#: A number with its unit, or what a probe says for one.
MEASURED = re.compile(
    r"too fast to see|\d[\d.,]*(?:e[-+]?\d+)?(?: ?(?:[kMGT]?i?B|bytes|[kMG]?bit/s|[nµm]?s)\b| ?%)?"
)
#: What a cluster has, and this machine instead.
INSTEAD = {
    "HOST|node0": "127.0.0.1",
    "1234|29400|29500": "$FREE_PORT",
    "nproc-per-node=8": "nproc-per-node=2",
}
#: Programs that bash finds first. Slurm's know what the pages use of them; `gradwire` sends few and
#: small messages, and checks one algorithm; the lighthouse is there at once; `make` sets nothing
#: up, and the demo's model is tiny.
PROGRAMS = {
    "make": f'exec "$MAKE" -f {ROOT}/Makefile -o .venv/ready BIN=.programs "$@"',
    "python": 'exec $PYTHON "$@"',
    "torchft_lighthouse": f'exec {sys.executable} {ROOT}/tests/lighthouse.py "$@"',
    "torchrun": f'exec $PYTHON {ROOT}/tests/torchrun.py "$@"',
    "gradwire": f'exec $PYTHON {ROOT}/tests/cli/commands.py "$@"',
    "scontrol": '[ "$1 $2" = "show hostnames" ] && tr , "\\n" <<< "$3"',
    "srun": 'for i in 0 1; do SLURM_NODEID=$i "$@" & nodes+=($!); done; for i in ${nodes[@]}; do wait $i || exit 1; done',
}
TINY = "--steps=4 --rank=2 -- --width=32 --layers=1 --context=16 --batch-size=2 --eval-windows=4"
SLURM = {"SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.1", "SLURM_NNODES": "2"}


@dataclass(frozen=True)
class Block:
    """A block of Python or bash. `line` is that of its fence, `first` that of the block with which
    its processes begin, 0 if it is a file or is not run; `shown` is what it prints as the page
    shows it."""

    page: str
    line: int
    language: str
    code: str
    how: str
    first: int
    shown: str | None = None
    varies: bool = False
    hidden: bool = False

    def says(self, word: str) -> str:
        """What stands after the `=` of a word; "" if the fence does not have it."""
        found = re.search(rf' {word}(?:="([^"]*)"|=(\d+))', self.how)
        return (found[1] or found[2]) if found else ""


def pages() -> list[str]:
    return sorted(
        str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    )


@cache
def blocks(page: str) -> list[Block]:
    return read(page, (ROOT / page).read_text())


def chain(page: str, first: int) -> list[Block]:
    """The blocks that run in the same processes, in order."""
    return [block for block in blocks(page) if block.first == first]


def read(page: str, text: str) -> list[Block]:
    """The blocks of a page, in order. Raises ValueError if a fence does not end, or says what is
    not known."""
    found: list[Block] = []
    # whether text would be what the last one prints
    prints, matches = False, list(FENCE.finditer(text))
    if len(re.findall(r"^ *```", text, re.MULTILINE)) != 2 * sum(
        bool(match["fence"]) for match in matches
    ):
        raise ValueError(f"{page}: a block does not end, or is indented otherwise than it begins")
    for match in matches:
        if match["heading"]:
            prints = False
            continue
        line = text.count("\n", 0, match.start()) + 1
        language, how = (
            match["language"] or match["hidden"] or "",
            (match["how"] or match["unseen"] or "").rstrip(),
        )
        if language not in HOW or not re.fullmatch(HOW[language], how):
            raise ValueError(f"{page}:{line}: {language!r}, {how!r}: give {HOW}")
        code = textwrap.dedent(match["code"] or match["setup"] or "")
        if language == "text":
            if prints:
                found[-1] = replace(
                    found[-1], shown="…" if "not-run" in how else code, varies="varies" in how
                )
            prints = False
            continue
        if language == "diff":  # what it leads to, each line in its place
            language, code = "python", re.sub(r"^(?:-.*|[+ ])", "", code, flags=re.MULTILINE)
        prints, first = not re.search("title=|not-run=", how), line
        if "continues" in how:
            first = next((block.first for block in reversed(found) if block.first), 0)
            if not first or re.search("ranks=|devices=", how):
                raise ValueError(f"{page}:{line}: nothing to continue, or in other processes")
        found.append(
            Block(page, line, language, code, how, first * prints, hidden=bool(match["hidden"]))
        )
    return found


def differs(printed: str, block: Block) -> bool:
    """Whether the page shows something else, but for spaces. Numbers with a decimal point may
    differ by one in the last digit that is shown: a processor may round them so."""
    shown, printed = (" ".join(text.split()) for text in (block.shown or "", printed))
    if block.varies:
        shown, printed = (MEASURED.sub("#", text) for text in (shown, printed))
    parts = [(part, re.fullmatch(r"\d+\.\d+", part)) for part in re.split(r"(\d+\.\d+|…)", shown)]
    pattern = "".join(
        r"(\d+\.\d+)" if number else ".*" if part == "…" else re.escape(part)
        for part, number in parts
    )
    found = re.fullmatch(pattern, printed)
    numbers = [part for part, number in parts if number]
    return found is None or any(
        abs(float(a) - float(b)) > 1.01 * 10.0 ** -len(b.split(".")[1])
        for a, b in zip(found.groups(), numbers, strict=True)
    )


@cache
def outcomes(page: str, first: int) -> dict[int, tuple[str, str]]:
    """By its line, what each of the blocks that run together has printed, of all ranks in order,
    and how it failed."""
    together, log, found = chain(page, first), "", {}
    ranks = int(together[0].says("ranks") or 1)
    with tempfile.TemporaryDirectory() as place:
        for block in blocks(page):
            if title := block.says("title"):  # lines have the numbers that they have on the page
                Path(place, title).write_text("\n" * block.line + block.code)
        Path(place, "examples").symlink_to(ROOT / "examples")
        try:
            launch.run_ranks(Path(__file__), ranks, page, first, place, launch.free_port())
        except AssertionError as error:
            log = str(error)
        files = [Path(place, f".rank{rank}") for rank in range(ranks)]
        said = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    for block in together:
        each = [of_rank.get(str(block.line), ("", "did not come to its end")) for of_rank in said]
        failed = "\n".join(dict.fromkeys(error for _, error in each if error))
        found[block.line] = "".join(printed for printed, _ in each), failed and f"{failed}\n{log}"
    return found


def follow(page: str, first: str, folder: str, port: str) -> None:
    """Run the blocks that run together, in this process."""
    together, rank, said = chain(page, int(first)), os.environ["RANK"], {}
    if not together[0].says("ranks"):  # nobody has started them by torchrun
        own = ("TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        for name in [name for name in os.environ if name.startswith(own)]:
            del os.environ[name]
    devices = launch.xla_flags(
        f"--xla_force_host_platform_device_count={together[0].says('devices') or 1}"
    )
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": launch.quickly_compiled(devices),
        "HEAD": "127.0.0.1",
        "PORT": port,
    }
    os.chdir(folder)
    sys.path[0] = folder
    warnings.simplefilter("error")
    # of torch, whose newest release has other names than the oldest
    warnings.simplefilter("default", FutureWarning)
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    for block in together:
        out, error = io.StringIO(), ""
        try:
            with contextlib.redirect_stdout(out):
                if block.language == "bash":
                    print(bash(block.code, Path(folder), int(block.says("nodes") or 1)), end="")
                else:
                    code = compile(
                        "\n" * block.line + block.code, ROOT / page, "exec", dont_inherit=True
                    )
                    exec(code, main.__dict__)
        except BaseException:
            error = traceback.format_exc()
        said[block.line] = out.getvalue(), error
        Path(folder, f".rank{rank}").write_text(json.dumps(said))
        if error:
            sys.exit(1)


def bash(code: str, folder: Path, nodes: int = 1, timeout: float = LIMIT) -> str:
    """What commands print on the first of so many nodes, on its standard output.

    Raises:
        AssertionError: they fail on one. No process is left.
    """
    (programs := folder / ".programs").mkdir(exist_ok=True)
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    for words, others in INSTEAD.items():
        code = re.sub(rf"\b({words})\b", others, code)
    env = {"PORT": str(launch.free_port())} | launch.environment(mark := uuid.uuid4().hex) | SLURM
    env |= {
        "PATH": f"{programs}:{env['PATH']}",
        "FREE_PORT": env["PORT"],
        "PYTHON": launch.interpreter(),
    }
    env |= {"MAKE": shutil.which("make") or "make", "ARGS": TINY}
    command = ["bash", "-euo", "pipefail", "-c", code]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as rest:
        to = [
            {"cwd": folder, "env": env | {"NODE": str(i)}, "stdout": rest if i else out}
            for i in range(nodes)
        ]
        started = [launch.Process(command, stderr=rest, **of_node) for of_node in to]
        launch.ended(started, timeout)
        codes = [node.poll() for node in started]
        launch.end_all(mark)
        printed, others = (file.seek(0) or file.read() for file in (out, rest))
    assert codes == [0] * nodes, f"{code}\nended with {codes}:\n{printed[-3000:]}\n{others[-3000:]}"
    return "".join(line for line in printed.splitlines(True) if not line.startswith("[Gloo]"))


if __name__ == "__main__":
    follow(*sys.argv[1:])
