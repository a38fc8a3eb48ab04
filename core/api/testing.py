"""`gradwire.testing.check(algorithm)`: does a method keep the promises that every driver relies
on?"""

from gradwire.core.simulate.testing import ConformanceError, check

__all__ = ["ConformanceError", "check"]
