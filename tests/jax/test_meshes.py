"""What the host does with states that lie on a mesh, whatever types its axes have and whatever mesh is in context, comes to what it does with arrays of one device."""

import itertools
from pathlib import Path

import pytest

from tests.jax import on_meshes
from tests.jax.on_meshes import AUTO, EXPLICIT, as_on_no_mesh, on_a_mesh, require_the_same
from tests.launch import jax_processes


@pytest.fixture(scope="module")
def expected():
    return {shape: as_on_no_mesh(shape) for shape in ((4,), (2, 2))}


#: Types of the axes, the mesh in context ("another" has axes that the compiler manages), and whether parameters lie there: sharded if there are two axes.
FEW = [((EXPLICIT,), None, True), ((EXPLICIT, EXPLICIT), "it", True), ((EXPLICIT, AUTO), "another", True)]
KINDS = [(EXPLICIT,), *set(itertools.product((EXPLICIT, AUTO), repeat=2)) - {(AUTO, AUTO)}]
MORE = [case for case in itertools.product(sorted(KINDS, key=str), (None, "it", "another"), (True,)) if case not in FEW]
MORE += [((EXPLICIT, EXPLICIT), "it", False), ((EXPLICIT,), "another", False), ((AUTO, AUTO), "it", True)]


@pytest.mark.parametrize(
    ("kinds", "inside", "placed"), [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_states_on_meshes_of_any_axes(expected, kinds, inside, placed):
    shape = (4,) if len(kinds) == 1 else (2, 2)
    require_the_same(on_a_mesh(shape, kinds, inside, placed=placed), expected[shape])


@pytest.mark.slow
def test_states_on_one_two_four_and_eight_devices():
    """Of one replica and of eight, of slices of one device and of several; in a process that has eight devices."""
    jax_processes(Path(on_meshes.__file__), 1, devices=8)
