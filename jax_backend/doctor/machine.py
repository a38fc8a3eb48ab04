"""What this process runs on: versions, hardware, libraries."""

from __future__ import annotations

import os
import platform
from typing import Any

import jax

from gradwire.core.simulate.doctor.report import versions_of

PACKAGES = (
    "gradwire",
    "numpy",
    "jaxlib",
    "flax",
    "optax",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "libtpu",
)
#: Of `jax.default_backend()`: where gradwire has been tried.
SEEN = ("cpu", "gpu")


def facts() -> dict[str, Any]:
    """Names to values that JSON has."""
    found: dict[str, Any] = {
        "host": platform.node(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "jax": jax.__version__,
        "platform": jax.default_backend(),
        "platform_version": jax.local_devices()[0].client.platform_version,
        "device": jax.local_devices()[0].device_kind,
        "local devices": jax.local_device_count(),
        "processes": jax.process_count(),
    }
    found |= versions_of(PACKAGES)
    return found | {
        name: os.environ[name] for name in ("XLA_FLAGS", "JAX_PLATFORMS") if name in os.environ
    }


def unseen() -> str:
    """What nobody has tried gradwire on; "" for CPUs and NVIDIA's devices."""
    if (
        jax.default_backend() == "gpu"
        and "rocm" in jax.local_devices()[0].client.platform_version.lower()
    ):
        return "ROCm"
    return "" if jax.default_backend() in SEEN else jax.default_backend().upper()
