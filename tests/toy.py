"""A backend that has NumPy's primitives and nothing else: every composite it runs is the body in
`core/ops.py`."""

from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.ops import Ops

#: The names that a backend must have.
PRIMITIVES = sorted(Ops.__abstractmethods__)


def toy(*, without: str = "", **others):
    """A class of such a backend, which lacks one primitive, or has other methods besides."""
    methods = {name: vars(NumpyOps)[name] for name in PRIMITIVES if name != without}
    return type("ToyOps", (Ops,), methods | others)


ToyOps = toy()
