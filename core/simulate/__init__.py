"""N replicas in one process, in NumPy: the reference driver, and how to test an algorithm on a
laptop."""

from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.protocol.programs import ReplicaMismatch
from gradwire.core.simulate.local import LocalSimulator
from gradwire.core.simulate.lock_step import lock_step
from gradwire.core.simulate.poison import PoisonOps
from gradwire.core.simulate.simulator import Simulator

__all__ = ["LocalSimulator", "NumpyOps", "PoisonOps", "ReplicaMismatch", "Simulator", "lock_step"]
