"""What an error message of the core tells its reader to write, written: a message without a row
fails, and so does advice that does not work."""

import numpy as np
import pytest

from gradwire import AllReduce, LocalSGD, OuterSGD, PowerSGD, Simulator, Spec, WireDtype, diloco
from gradwire.core.buckets.reducer import Reducer
from gradwire.core.local_sgd.fragments import fragments_of
from gradwire.core.plan.expressions import parse_algorithm
from gradwire.core.protocol.reductions import Reduce
from gradwire.core.simulate import LocalSimulator, PoisonOps
from tests.told import advice, require_done

SHAPES = {"w": (24, 16), "b": (7,)}


def step(algorithm, replicas=4):
    Simulator(algorithm, SHAPES, replicas).step(
        [{n: np.ones(s) for n, s in SHAPES.items()}] * replicas
    )


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


def backwards():
    """As `x[::-1]` of an axis, in every framework."""
    ops, x = PoisonOps(), np.arange(3.0)
    assert ops.take(x, np.array([2, 1, 0], np.int32)).tolist() == [2.0, 1.0, 0.0]


TURNS = "tests/jax/test_local_sgd.py::test_a_turn_of_another_step_is_counted_and_refused"
CHECKPOINTS = (
    "tests/torch/test_ddp_features.py::test_gradients_are_averages_whatever_passes_there_are"
)
SEEDS = "tests/cli/test_compare.py::test_a_comparison_that_was_stopped_goes_on"
#: What a message tells → the same, done, or the test that does it where that takes a framework.
ROWS = {
    "give an instance, such as PowerSGD(rank=4), AllReduce() or WireDtype(AllReduce(), 'bfloat16')": lambda: [
        step(algorithm)
        for algorithm in (PowerSGD(rank=4), AllReduce(), WireDtype(AllReduce(), "bfloat16"))
    ],
    "Give it an argument `seed` to use, or seeds=1": SEEDS,
    "call end() or abandon() first": lambda: [abandoned(how) for how in ("end", "abandon")],
    "pass does not use them in every step, or the loss does not depend on all outputs: pass find_unused_parameters=True": "tests/torch/test_weights.py::test_unused_parameters_and_weights_share_a_message",
    "set requires_grad=False before wrapping the module.": "tests/torch/test_ddp_features.py::"
    "test_parameters_that_ddp_leaves_alone_have_no_memory_and_are_not_sent",
    "give OuterSGD(…), or what makes one of torch or Optax": lambda: local_step(
        LocalSGD(1, outer=OuterSGD(0.5))
    ),
    "use {} at most, or eager=True, which gives it the whole period": lambda: [
        overlapped(overlap=3),
        overlapped(eager=True),
    ],
    "use fewer, or layout='size', which divides tensors and not layers": lambda: [
        in_fragments(2),
        in_fragments(4, layout="size"),
    ],
    "call `on_nodes_of(size)` first": lambda: (
        LocalSGD(4, subgroup="node").on_nodes_of(2).subgroups(4)
    ),
    "give that of the step, tx.turn(n), or one after the other of tx.turns(state)": TURNS,
    "take it from the transformation that averages: tx.turn(n) or tx.turns(state)": TURNS,
    "take(x, positions)": backwards,
    "write it as PowerSGD(rank=4)": lambda: step(parse_algorithm("PowerSGD(rank=4)")),
    "write WireDtype(AllReduce(), {}), or {} alone": lambda: [
        step(parse_algorithm(text)) for text in ("WireDtype(AllReduce(), 'int8')", "int8")
    ],
    "give the method itself, on the command line by --algorithm module:Class(…)": "tests/cli/test_compare.py::"
    "test_an_advice_of_a_method_of_ones_own",
    "give an array, ops.asarray({}, 'float32')": lambda: PoisonOps().abs(
        PoisonOps().asarray(1.0, "float32")
    ),
    "Write ops.cast(x, {})": "tests/core/test_own_methods.py::test_what_memory_holds_after_a_step_is_what_it_held_before",
    "pass watched=False": lambda: Reduce(
        (np.ones(2),), donated=(False,), watched=False, groups=((0, 1), (2, 3))
    ),
    "give square=True.": lambda: step(PowerSGD(1, square=True)),
    "give the same losses: make() seeds its generators itself": SEEDS,
    "give Training(..., evaluate=)": "tests/cli/test_compare.py::test_a_comparison_is_printed_kept_and_drawn",
    "use OuterSGD(…) here, which is the same everywhere": lambda: local_step(
        diloco(1, outer=OuterSGD(0.5, 0.9))
    ),
    "use `checkpoint(..., use_reentrant=False)`": CHECKPOINTS,
    "use `checkpoint(..., use_reentrant=False)`.": CHECKPOINTS,
    "give it to gradwire.torch_backend.register_comm_hook, in JAX to gradwire.jax_backend.AutoStep, and here one method, such as the one that it has chosen (handle.stats().choices)": "tests/torch/"
    "test_auto.py::test_what_cannot_be_is_refused_by_name",
    "give it weighted=True": lambda: local_step(LocalSGD(1, weighted=True), weights=[1, 3]),
}


def test_every_advice_has_a_row():
    assert advice("core") == set(ROWS)


@pytest.mark.parametrize("told", ROWS)
def test_advice_works(told):
    require_done(ROWS[told])
