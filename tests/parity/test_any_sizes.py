"""Parameters of any sizes, few of whose numbers suit a method: torch's driver against the
simulator, all replicas in one process."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import Simulator
from gradwire.torch_backend.advise.compare.one_process import World
from gradwire.torch_backend.engine.driver import Driver, specs_of
from tests.methods import METHODS
from tests.parity.cases import TOLERANCE, assert_close

#: Beside small ones those about which methods do something else: of a block, a byte, a rank.
SIZES = st.one_of(st.integers(0, 70), st.sampled_from([127, 128, 129, 192]))
SHAPES = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(SIZES),
        st.tuples(SIZES, st.integers(1, 9)),
        st.tuples(st.integers(1, 9), SIZES),
        st.tuples(st.integers(1, 3), st.integers(1, 9), SIZES),
    ),
    min_size=1,
    max_size=4,
)
#: But those that are told of parameters by name.
CASES = [case for case in METHODS if "views" not in case and "by_name" not in case]
STEPS = 2


def allowed(case: str) -> float:
    """Factors are those of another BLAS, whose codes may be the next ones."""
    return 0.1 if case.startswith("wire_factors") else TOLERANCE


def hold(case, shapes, replicas, seed, *, steps=2, host_knows=True):
    """Take some steps with both, and compare averages."""
    algorithm = METHODS[case].algorithm
    named = {str(i): shape for i, shape in enumerate(shapes)}
    random = np.random.default_rng(seed)
    reference = Simulator(algorithm, named, replicas, dtype="float32")
    world, specs = World(replicas), specs_of({n: torch.zeros(s) for n, s in named.items()})
    drivers = world.on_each(
        lambda rank: Driver(algorithm, specs, torch.device("cpu"), world.groups(rank))
    )
    for driver in drivers:
        driver.ops.host_knows = host_knows
    for _ in range(steps):
        gradients = [
            {n: random.standard_normal(s, np.float32) for n, s in named.items()}
            for _ in range(replicas)
        ]
        expected = reference.step(gradients)
        found = [{n: torch.tensor(x) for n, x in own.items()} for own in gradients]

        def add(rank, found=found):
            drivers[rank].add(found[rank], first=True, last=True)

        world.on_each(add)
        for n, x in expected.items():
            assert all(torch.equal(own[n], found[0][n]) for own in found)
            scale = np.linalg.norm(gradients[0][n])
            what = f"{shapes}, {n}"
            assert_close(what, found[0][n], x, scale, allowed(case), continuous=False)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=6)
@given(shapes=SHAPES, replicas=st.integers(1, 3), seed=st.integers(0, 9))
def test_tensors_together_are_those_of_the_simulator(case, shapes, replicas, seed):
    hold(case, shapes, replicas, seed)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=6)
@given(shapes=SHAPES, replicas=st.integers(1, 3), seed=st.integers(0, 9))
def test_so_are_they_as_on_a_device(case, shapes, replicas, seed):
    hold(case, shapes, replicas, seed, host_knows=False)


@pytest.mark.parametrize("case", CASES)
def test_a_vector_alone_is_that_of_the_simulator(case):
    """Of each size to beyond a block, some of which only fill part of it."""
    for n in range(1, 67):
        hold(case, [(n,)], 2, n, steps=1)
