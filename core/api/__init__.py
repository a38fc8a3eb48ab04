"""gradwire: communication-efficient data-parallel training, each algorithm written once for torch
and JAX.

    import gradwire
    gradwire.plan({"w": (2048, 512)}, gradwire.PowerSGD(rank=4))

Importing this loads neither torch nor jax: those live in `gradwire.torch_backend` and
`gradwire.jax_backend`, which are imported when they are first asked for.
"""

import importlib
from typing import Any

from gradwire.advising import advise
from gradwire.comparing import compare
from gradwire.core.advise.advice import Advice
from gradwire.core.advise.choosing.methods import Auto
from gradwire.core.advise.compare.comparison import Comparison
from gradwire.core.advise.probe import Probe
from gradwire.core.algorithm import Algorithm, State
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.compressor import Compressor, StepContext
from gradwire.core.algorithms.power_sgd import PowerSGD
from gradwire.core.algorithms.quantize import Quantize
from gradwire.core.algorithms.sign import Sign
from gradwire.core.algorithms.top_k import TopK
from gradwire.core.algorithms.two_level import TwoLevel
from gradwire.core.algorithms.weighted import Weighted
from gradwire.core.algorithms.wire_dtype import WireDtype
from gradwire.core.buckets.assignment import assign_buckets
from gradwire.core.kernels.payloads import LowRank
from gradwire.core.local_sgd.algorithm import LocalSGD, diloco
from gradwire.core.local_sgd.outer import OuterSGD
from gradwire.core.ops import Spec
from gradwire.core.plan.advice import CompressionWarning
from gradwire.core.plan.plan import plan
from gradwire.core.plan.result import Plan
from gradwire.core.plan.traffic import Traffic
from gradwire.core.plan.utilization import link_for, utilization
from gradwire.core.protocol.programs import ReplicaMismatch
from gradwire.core.protocol.weights import NobodyCounts
from gradwire.core.simulate.local import LocalSimulator
from gradwire.core.simulate.simulator import Simulator
from gradwire.core.state.flax_names import FlaxNames
from gradwire.core.zero.sharded_step import Zero
from gradwire.core.zero.sharding import shard_by_bucket, shard_by_element, shard_by_parameter
from gradwire.doctoring import doctor

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "Algorithm",
    "AllReduce",
    "Auto",
    "Comparison",
    "CompressionWarning",
    "Compressor",
    "FlaxNames",
    "LocalSGD",
    "LocalSimulator",
    "LowRank",
    "NobodyCounts",
    "OuterSGD",
    "Plan",
    "PowerSGD",
    "Probe",
    "Quantize",
    "ReplicaMismatch",
    "Sign",
    "Simulator",
    "Spec",
    "State",
    "StepContext",
    "TopK",
    "Traffic",
    "TwoLevel",
    "Weighted",
    "WireDtype",
    "Zero",
    "advise",
    "assign_buckets",
    "compare",
    "diloco",
    "doctor",
    "link_for",
    "plan",
    "shard_by_bucket",
    "shard_by_element",
    "shard_by_parameter",
    "utilization",
]

_BACKENDS = ("jax_backend", "torch_backend")


def __getattr__(name: str) -> Any:
    if name in _BACKENDS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(
        {*__all__, *_BACKENDS, "core", *(name for name in globals() if name.startswith("__"))}
    )
