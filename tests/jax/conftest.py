"""Compilation that is quick rather than clever.

Most of the time here would be XLA's: it compiles each of some hundred kernels for 20 ms and runs it for microseconds. Unoptimized code is
compiled seven times as fast and does the same arithmetic. The JAX processes of the parity tests run optimized code.
"""

import os

for flag in ("--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false"):
    if flag.split("=")[0] not in os.environ["XLA_FLAGS"]:
        os.environ["XLA_FLAGS"] += f" {flag}"
