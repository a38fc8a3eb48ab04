"""What numba compiles for processors, beside NumPy and beside torch's operations, whose bits codes
and their means have to have."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradwire.core.simulate.doctor.composites import composites
from gradwire.core.simulate.doctor.kernels import Check
from gradwire.core.simulate.doctor.report import Fault, Section
from gradwire.torch_backend.cpu.compiled import ARGUMENTS, prepare
from gradwire.torch_backend.ops.kernels import TorchOps

NDArray = npt.NDArray[Any]
#: The end of what is said of a wrong loop.
WITHOUT = "NUMBA_DISABLE_JIT=1 trains without compiled loops"


def check_loops(section: Section, device: torch.device) -> None:
    """Each loop, on a CPU: on hostile input, with rows and columns that fill no tile."""
    if device.type != "cpu":
        return
    plain, ops = TorchOps(device), TorchOps(device)

    def compiled() -> str:
        ops.loops = prepare(((name, torch.float32) for name in ARGUMENTS), large=1)
        return (
            ops.loops.card
            or "none, so torch's operations are used: numba is not installed, or not to be used"
        )

    section.check("compiled loops", compiled)
    if ops.loops:
        for name, check in composites().items():
            section.check(f"compiled loops, {name}", functools.partial(_check, check, plain, ops))


def _check(check: Check, plain: TorchOps, ops: TorchOps) -> None:
    found = _made(check, ops)
    try:
        check.require(found)
        if check.strays:
            _require_bits(found, _made(check, plain))
    except Fault as fault:
        raise Fault(f"{fault}. {WITHOUT}") from None


def _made(check: Check, ops: TorchOps) -> list[NDArray]:
    with torch.no_grad():
        answers = check.call(
            ops, {name: torch.from_numpy(x.copy()) for name, x in check.given.items()}
        )
    return [x.numpy() for x in answers]


def _require_bits(found: list[NDArray], plain: list[NDArray]) -> None:
    """Require equal bits of what is finite: which NaN or inf a code of a row with such is, nobody
    says."""
    for i, (mine, right) in enumerate(zip(found, plain, strict=True)):
        both = (
            np.where(np.isfinite(mine), mine, np.nan),
            np.where(np.isfinite(right), right, np.nan),
        )
        if not np.array_equal(*both, equal_nan=True):
            differ = np.count_nonzero(
                ~((both[0] == both[1]) | (np.isnan(both[0]) & np.isnan(both[1])))
            )
            raise Fault(
                f"array {i} of {len(plain)} differs from what torch's operations make of it in"
                f" {differ} of {right.size} elements"
            )
