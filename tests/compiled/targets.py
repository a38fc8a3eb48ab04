"""Accelerators that are not here, as their compilers know them: libtpu for two slices of v5e, XLA
for CUDA with a described H100.

`make test-compiled` puts both compilers into build/compilers. `prepare` is to be called before JAX
is imported.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMPILERS = ROOT / "build" / "compilers"
#: One slice of v5e, two of them, and an H100 with three others.
PACKAGES = {"v5e": "libtpu", "tpu": "libtpu", "h100": "jax_cuda12_plugin"}


def missing(target: str) -> str:
    """Why nothing can be compiled for it; "" if it can."""
    package = PACKAGES[target]
    here = (COMPILERS / package).is_dir() or importlib.util.find_spec(package) is not None
    return "" if here else f"{package} is not installed; `make test-compiled` does that"


def prepare() -> None:
    """Let JAX find the compilers. They do not know the flags of the CPU's."""
    os.environ.pop("XLA_FLAGS", None)
    library = COMPILERS / "libtpu" / "libtpu.so"
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "JAX_PLATFORMS": "cpu",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = (
        "1"  # it would guard a device that is not there from a second test process
    )
    if library.exists():
        os.environ["TPU_LIBRARY_PATH"] = str(library)
    sys.path.insert(0, str(COMPILERS))


def mesh(target: str, nodes: bool = False) -> Any:
    """Replicas along "dcn", over the slow link, and the devices of each along "ici": two slices of
    four; or four of one device, TPUs or GPUs; or, of four, `nodes` of two."""
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    if target == "tpu":
        found = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2", num_slices=2)
    elif target == "v5e":
        found = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    else:
        described = (Path(__file__).parent / "h100.txt").read_text()
        found = topologies.get_topology_desc(
            platform="cuda", topology_name="h100", target_config=described, topology="1x1x4"
        )
    return Mesh(
        np.array(found.devices).reshape((2, -1) if target == "tpu" or nodes else (-1, 1)),
        ("dcn", "ici"),
    )
