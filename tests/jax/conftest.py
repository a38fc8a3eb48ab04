"""Four CPU devices, also when this folder's tests are run on their own; and compilation that is quick rather than clever.

Most of the time here would be XLA's: it compiles each of some hundred kernels for 20 ms and runs it for microseconds. Unoptimized code is
compiled seven times as fast and does the same arithmetic. The JAX processes of the parity tests run optimized code.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
for flag in (
    "--xla_force_host_platform_device_count=4",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
):
    if flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
