"""What an error message of the core tells its reader to write, written: a message without a row fails, and so does advice that does not work."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest

from gradwire import AllReduce, LocalSGD, OuterSGD, PowerSGD, Simulator, Spec, WireDtype, diloco
from gradwire.core.buckets.reducer import Reducer
from gradwire.core.local_sgd.fragments import fragments_of
from gradwire.core.plan.expressions import parse_algorithm
from gradwire.core.protocol.collective_requests import Reduce
from gradwire.core.simulate import LocalSimulator

ROOT = Path(__file__).parents[2]
TOLD = re.compile(r"\b(use|give|pass|take|write|call|set)\b", re.IGNORECASE)
CODE = re.compile(r"[A-Za-z_][\w.]*\(|\w+=[^=\s]")
SHAPES = {"w": (24, 16), "b": (7,)}


def texts(node):
    """Every text in a raised exception, what is filled in as {}."""
    for x in ast.walk(node):
        if isinstance(x, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in x.values)
        elif isinstance(x, ast.Constant) and isinstance(x.value, str):
            yield x.value


def advice():
    """The part of each message of the core, from the word that tells, that names code."""
    for path in sorted((ROOT / "core").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                for part in re.split(r"[.;:]\s", max(texts(node.exc), key=len, default="")):
                    told = TOLD.search(part)
                    if told and CODE.search(part[told.start() :]):
                        yield part[told.start() :]


def step(algorithm, replicas=4):
    Simulator(algorithm, SHAPES, replicas).step([{n: np.ones(s) for n, s in SHAPES.items()}] * replicas)


def abandoned(how):
    reducer = Reducer("ab", [[0, 1]])
    reducer.begin()
    for i in range(2):
        reducer.ready(i)
    getattr(reducer, how)()
    reducer.begin()


def local_step(local, **options):
    parameters = {n: np.zeros(s) for n, s in SHAPES.items()}
    simulator = LocalSimulator(local, parameters, 2)
    simulator.step([parameters] * 2, lambda replica, p, g: p, **options)


def overlapped(**options):
    assert diloco(4, **options).overlap == options.get("overlap", 0)


def in_fragments(count, **options):
    specs = {f"{i}.{part}": Spec((4,)) for i in range(2) for part in ("w", "b")}
    assert len(fragments_of(specs, count, options.get("layout", "strided"))) == count


#: What a message tells → the same, done; or the test that does it, where that takes a framework.
ROWS = {
    "give an instance, such as PowerSGD(rank=4), AllReduce() or WireDtype(AllReduce(), 'bfloat16')": lambda: [
        step(algorithm) for algorithm in (PowerSGD(rank=4), AllReduce(), WireDtype(AllReduce(), "bfloat16"))
    ],
    "Give it an argument `seed` to use, or seeds=1": "tests/cli/test_compare.py::test_a_comparison_that_was_stopped_goes_on",
    "call end() or abandon() first": lambda: [abandoned(how) for how in ("end", "abandon")],
    "pass find_unused_parameters=True": "tests/torch/test_weights.py::test_unused_parameters_and_weights_share_a_message",
    "set requires_grad=False before wrapping the module.": "tests/torch/test_ddp_features.py::"
    "test_parameters_that_ddp_leaves_alone_have_no_memory_and_are_not_sent",
    "give OuterSGD(…), or what makes one of torch or Optax": lambda: local_step(LocalSGD(1, outer=OuterSGD(0.5))),
    "use {} at most, or eager=True, which gives it the whole period": lambda: [
        overlapped(overlap=3),
        overlapped(eager=True),
    ],
    "use fewer, or layout='size', which divides tensors and not layers": lambda: [
        in_fragments(2),
        in_fragments(4, layout="size"),
    ],
    "call `on_nodes_of(size)` first": lambda: LocalSGD(4, subgroup="node").on_nodes_of(2).subgroups(4),
    "give that of the step, tx.turn(n), or one after the other of tx.turns(state)": "tests/jax/test_local_sgd.py::"
    "test_a_turn_of_another_step_is_counted_and_refused",
    "write it as PowerSGD(rank=4)": lambda: step(parse_algorithm("PowerSGD(rank=4)")),
    "pass watched=False": lambda: Reduce((np.ones(2),), donated=(False,), watched=False, groups=((0, 1), (2, 3))),
    "give it weighted=True": lambda: local_step(LocalSGD(1, weighted=True), weights=[1, 3]),
}


def test_every_advice_has_a_row():
    assert set(advice()) == set(ROWS)


@pytest.mark.parametrize("told", ROWS)
def test_advice_works(told):
    row = ROWS[told]
    if isinstance(row, str):
        path, _, name = row.partition("::")
        defined = ast.walk(ast.parse((ROOT / path).read_text()))
        assert name in {node.name for node in defined if isinstance(node, ast.FunctionDef)}
    else:
        row()
