"""Two nodes of three ranks on Gloo, where there are more places than replicas between which they
compress: factors and positions are cut in three parts."""

import pytest

from tests.torch import test_two_levels as of_two
from tests.torch.ranks import Cases

pytestmark = pytest.mark.slow

cases = Cases(__file__, ranks=6)


@cases.each(
    {name: of_two.ALGORITHMS[name] for name in ("the norm of the whole model", "positions")}
)
def test_equals_the_simulator_in_one_message(world, algorithm):
    of_two.compare_with_the_simulator(world, algorithm, cap=25)
