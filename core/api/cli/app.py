"""The commands and their arguments.

gradwire plan model:build -a "WireDtype(PowerSGD(16), 'int8')" --replicas 16 --link 10Gbit
torchrun --nproc-per-node=8 --no-python gradwire probe --output probe.json
gradwire advise model:build --probe probe.json --step-ms 180
gradwire compare my_training:make -a "WireDtype(PowerSGD(16), 'int8')" -a int8 --steps 300 --seeds 3
gradwire doctor --quick
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from gradwire.cli.advise import load_probe, print_advice
from gradwire.cli.compare import Network, each_after, print_comparison
from gradwire.cli.doctor import run_doctor
from gradwire.cli.models import BadArgument, load_callable, load_model, of_users
from gradwire.cli.plan import Link, print_plans
from gradwire.cli.probe import run_probe
from gradwire.core.advise.losses import limits_of
from gradwire.core.plan.expressions import NAMES, NotAnAlgorithm, parse_algorithm
from gradwire.core.plan.links import RINGS
from gradwire.core.text import units

T = TypeVar("T")
#: Replicas. Groups of more are lists that nobody has memory for.
MOST = 1 << 20
#: Milliseconds of a year.
LONGEST_MS = 365 * 86_400e3
#: Exit statuses: of a wrong argument, of what could not be written, as on a full disk or where
#: nobody reads on (`| head`), and of Ctrl-C.
WRONG, UNWRITTEN, INTERRUPTED = 2, 1, 130

app = typer.Typer(
    name="gradwire",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=(
        f'An --algorithm is written as in Python, of {", ".join(NAMES)}: "WireDtype(PowerSGD(16),'
        " 'int8')\". int8 alone is an average in 8 bits; a class of your own is"
        ' "module:Class(option=3)".'
    ),
)

Model = Annotated[
    str,
    typer.Argument(
        help=(
            "module:callable that returns a torch, Flax or Equinox model or a tree of arrays; a"
            " class or a config.json of transformers; a safetensors file; a JSON of shapes."
        ),
        metavar="MODEL",
    ),
]
Algorithms = Annotated[
    list[str],
    typer.Option(
        "--algorithm",
        "-a",
        help='As in Python: "PowerSGD(rank=16)"; or int8; or module:Class(…). Several times.',
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _version(asked: bool) -> None:
    if asked:
        print(f"gradwire {version('gradwire')}")
        raise typer.Exit


@app.callback()
def gradwire(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """What compression sends, what your network takes, and whether it will help."""


@app.command(short_help="What a step sends, and how long a link takes for it.")
def plan(
    model: Model,
    algorithm: Algorithms = ["WireDtype(PowerSGD(16), 'int8')"],  # noqa: B006  (typer reads it)
    replicas: Annotated[int, typer.Option(min=1, max=MOST, help="How many replicas average.")] = 2,
    link: Annotated[
        str, typer.Option(help="Rate of the slowest link, per direction: 10Gbit, 1.25GB/s.")
    ] = "10Gbit",
    latency: Annotated[str, typer.Option(help="Time of one hop: 50us.")] = "50us",
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Machines. What stays inside one is not on the link; of a single one, the link is"
            " that between its replicas. None: one for each replica.",
        ),
    ] = None,
    library: Annotated[
        str,
        typer.Option(
            help="What carries messages, where a machine has several replicas: nccl or gloo."
        ),
    ] = "nccl",
    step_ms: Annotated[
        float | None, typer.Option(help="A step of one replica alone, in milliseconds.")
    ] = None,
    utilization: Annotated[
        bool,
        typer.Option(
            "--utilization", help="Also the share of the time that computes, and the link for 90 %."
        ),
    ] = False,
    summary: Annotated[
        bool, typer.Option("--summary", help="The totals, without the table of tensors.")
    ] = False,
    json: Json = False,
) -> None:
    """What a step sends, tensor by tensor, for one algorithm or several side by side, and how long
    the link takes for it."""
    loaded = load_model(model)
    algorithms = algorithms_of(algorithm)
    if library not in RINGS:
        raise BadArgument(f"--library {library!r} is none: give {' or '.join(RINGS)}")
    shape = Link(
        argument("--link", units.rate, link),
        argument("--latency", units.seconds, latency),
        replicas,
        nodes or replicas,
        library,
    )
    if utilization and step_ms is None:
        raise BadArgument("--utilization needs --step-ms, the time of a step of one replica alone")
    if step_ms is not None and not 0 < step_ms < LONGEST_MS:
        raise BadArgument(f"--step-ms {step_ms:g} must be more than 0, and less than a year")
    step = step_ms / 1e3 if utilization and step_ms is not None else None
    print_plans(loaded, algorithms, shape, step, summary=summary, as_json=json)


@app.command(short_help="Measure the network between processes.")
def probe(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where the first process writes it.")
    ] = Path("probe.json"),
    framework: Annotated[
        str | None,
        typer.Option(
            help="torch (under torchrun) or jax. None: torch where torchrun has started this."
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Machines. None: as the launcher says.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="nccl or gloo, for torch. None: nccl where there are GPUs, each for one process."
        ),
    ] = None,
    coordinator: Annotated[str | None, typer.Option(help="HOST:PORT for jax.distributed.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="How many there are, for jax.distributed.")
    ] = None,
    process: Annotated[
        int | None, typer.Option(min=0, help="Which of them this is, for jax.distributed.")
    ] = None,
) -> None:
    """Measure latency and bandwidth between the processes that torchrun or jax.distributed has
    joined, in some seconds."""
    run_probe(framework, output, nodes, backend, coordinator, processes, process)


@app.command(short_help="Whether compression helps here, and which method.")
def advise(
    model: Model,
    probe: Annotated[str, typer.Option(help="What `gradwire probe` has written.")] = "probe.json",
    step_ms: Annotated[
        float | None, typer.Option(help="A step of one replica alone, in milliseconds.")
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(
            help="module:train_step instead: a function that does such a step on this device."
        ),
    ] = None,
    algorithm: Annotated[
        list[str] | None,
        typer.Option(
            "--algorithm",
            "-a",
            help="What to compare with uncompressed averages. None: one of each kind.",
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help=(
                "By how much the loss may be higher than that of uncompressed averages: 1%. None:"
                " the best at 0.5, 2 and 5 %."
            )
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            help=(
                "What `gradwire compare` has written of this model: its losses are weighed. None:"
                " those of one small model."
            )
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Whether compression helps, and which: predicted steps of all methods, from what they cost on
    this device, and one recommendation."""
    algorithms = algorithms_of(algorithm)
    limits = argument("--loss", limits_of, loss) if loss is not None else limits_of(None)
    network = argument("--probe", load_probe, probe)
    print_advice(
        load_model(model), network, step_ms, measure, algorithms, limits, compare, as_json=json
    )


class _Compare(TyperCommand):
    """Its `--rates` takes several numbers, which click's options do not."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(each_after("--rates", args)))


@app.command(cls=_Compare, short_help="Train your model under several methods, and compare losses.")
def compare(
    training: Annotated[
        str,
        typer.Argument(
            help="module:callable that builds a training, see gradwire.torch_backend.Training.",
            metavar="TRAINING",
        ),
    ],
    algorithm: Annotated[
        list[str],
        typer.Option(
            "--algorithm", "-a", help="What to compare with uncompressed averages. Several times."
        ),
    ],
    replicas: Annotated[
        int, typer.Option(min=1, help="How many replicas train, on this device.")
    ] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Of each run.")] = 300,
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of each method; one gives no intervals.")
    ] = 3,
    rates: Annotated[
        list[float],
        typer.Option(
            help=(
                "Factors on your learning rate, `--rates 0.5 1 2`, of which each method is given"
                " its best."
            )
        ),
    ] = [1.0],  # noqa: B006  (typer reads it)
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Where runs are kept, and a comparison that was stopped goes on."
        ),
    ] = Path("comparison.json"),
    link: Annotated[
        str | None,
        typer.Option(
            help="Draw losses against time too, over a link between replicas: 1Gbit, 125MB/s."
        ),
    ] = None,
    latency: Annotated[str, typer.Option(help="With --link: time of one hop, 50us.")] = "50us",
    probe: Annotated[
        str | None,
        typer.Option(help="The same, over the link that `gradwire probe` has measured: its file."),
    ] = None,
    step_ms: Annotated[
        float | None,
        typer.Option(help="With either: a step of one replica alone, in milliseconds."),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help=(
                "The losses drawn, with all seeds: .svg, .png or .pdf. None: an SVG beside the"
                " output."
            )
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="All losses as a table, a row for each evaluation.")
    ] = None,
    json: Json = False,
) -> None:
    """Train your own model under several methods, on this device, and say how their held-out losses
    differ."""
    algorithms = algorithms_of(algorithm)
    network = Network.of(
        step_ms,
        None if link is None else argument("--link", units.rate, link),
        argument("--latency", units.seconds, latency),
        None if probe is None else argument("--probe", load_probe, probe),
        replicas,
    )
    status = print_comparison(
        training,
        algorithms,
        replicas,
        steps,
        seeds,
        rates,
        output,
        network,
        picture,
        csv,
        as_json=json,
    )
    if status:
        raise typer.Exit(status)


@app.command(short_help="Check that gradwire is right on this hardware.")
def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="One algorithm of each kind, within a minute.")
    ] = False,
    algorithm: Annotated[
        list[str] | None,
        typer.Option("--algorithm", "-a", help="What to try. None: all that are shipped."),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="The report, written after each check: send it with a bug report.",
        ),
    ] = Path("doctor.json"),
    json: Json = False,
) -> None:
    """Check that gradwire is right here: kernels, messages and algorithms beside known answers, on
    this machine or under torchrun."""
    algorithms = algorithms_of(algorithm)
    status = run_doctor(algorithms or None, output, quick=quick, as_json=json)
    if status:
        raise typer.Exit(status)


def argument(name: str, read: Callable[[str], T], text: str) -> T:
    """What an argument says. Raises BadArgument, with its name."""
    try:
        return read(text)
    except BadArgument:
        raise
    except NotAnAlgorithm as error:
        raise BadArgument(f"--algorithm {error}") from error
    except ValueError as error:
        raise BadArgument(f"{name} {error}") from error


def algorithms_of(texts: list[str] | None) -> list[Any]:
    """What each `--algorithm` says, with classes of the user's own. Raises BadArgument."""

    def own(name: str) -> Callable[..., Any]:
        return load_callable(name, "--algorithm")

    return [
        argument("--algorithm", lambda each: parse_algorithm(each, own), text)
        for text in texts or []
    ]


def main(args: list[str] | None = None) -> None:
    """Run a command. What is wrong with its arguments goes to the standard error in one line, and
    the exit status is 2. It is 130 after Ctrl-C, and 1 where the output cannot be written."""
    if sys.stdout is None:  # closed, `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # not every encoding has a ×
    try:
        given = sys.argv[1:] if args is None else args
        with of_users():  # all that a command calls of theirs
            status: Any = app(given, standalone_mode=False)
        if status == INTERRUPTED:
            _say("interrupted")
        sys.stdout.flush()
    except BadArgument as error:
        _say(str(error))
        sys.exit(WRONG)
    except typer.Exit as error:
        sys.exit(error.exit_code)
    except OSError as error:
        # Python would flush once more when it leaves, and say a second time that it cannot.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            _say(str(error))
        sys.exit(UNWRITTEN)
    except Exception as error:
        # click's own, which know how they want to be shown
        if not hasattr(error, "show") or not hasattr(error, "exit_code"):
            raise
        error.show()
        sys.exit(error.exit_code)
    sys.exit(status if isinstance(status, int) else 0)


def _say(message: str) -> None:
    print(f"gradwire: {message}", file=sys.stderr)
