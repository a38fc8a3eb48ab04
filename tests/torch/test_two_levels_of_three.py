"""Two nodes of three ranks on Gloo, where there are more places than replicas between which they compress."""

import pytest

from tests.torch import test_two_levels as of_two
from tests.torch.ranks import Cases

pytestmark = pytest.mark.slow

cases = Cases(__file__, ranks=6)


#: What is cut in three parts: factors, positions and codes, with memory.
ALGORITHMS = ("PowerSGD", "the norm of the whole model", "positions", "codes with memory", "codes on both levels")


@cases.each({name: of_two.ALGORITHMS[name] for name in ALGORITHMS})
def test_equals_the_simulator_in_any_buckets(world, algorithm):
    of_two.compare_with_the_simulator(world, algorithm)


@cases.case
def test_a_model_of_one_large_tensor_equals_the_simulator(world):
    of_two.compare_a_large_tensor(world)


@cases.case
def test_a_checkpoint_goes_on_with_other_nodes(world):
    of_two.go_on_with_other_nodes(world)
