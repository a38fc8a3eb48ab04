"""What this process runs on: versions, hardware, libraries."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire.core.simulate.doctor.report import versions_of

DRIVER = Path("/proc/driver/nvidia/version")
PACKAGES = ("gradwire", "numpy", "numba", "triton")
#: Facts in which ranks may not differ: between other versions of these, messages or numbers are
#: others.
ALIKE = ("torch", "cuda", "nccl", "gradwire")


def facts(device: torch.device) -> dict[str, Any]:
    """Names to values that JSON has."""
    found: dict[str, Any] = {
        "host": platform.node(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    found |= versions_of(PACKAGES)
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        found["cuda"], found["hip"] = torch.version.cuda, torch.version.hip
        if dist.is_available() and dist.is_nccl_available():
            nccl: Any = torch.cuda.nccl.version
            found["nccl"] = ".".join(map(str, nccl()))
    if DRIVER.exists():
        found["driver"] = DRIVER.read_text().splitlines()[0]
    found |= {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("NCCL_", "GLOO_"))
    }
    return found


def unseen(device: torch.device) -> str:
    """What nobody has tried gradwire on; "" for CPUs and NVIDIA's devices."""
    if device.type == "cuda" and torch.version.hip:
        return "ROCm"
    return "" if device.type in ("cpu", "cuda") else device.type.upper()


def first_device() -> torch.device:
    """The accelerator that torch sees, or the CPU."""
    if torch.cuda.is_available():
        return torch.device(
            "cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
        )
    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        found: torch.device = accelerator.current_accelerator()
        return torch.device(found.type, 0)
    return torch.device("cpu")
