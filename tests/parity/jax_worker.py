"""One of several real JAX processes: every case named, through pmap over all of them. Saves its traces in `{folder}/{process}.pkl`.

Called as `jax_worker.py PORT PROCESS COUNT FOLDER CASE...`.
"""

import pickle
import sys
from pathlib import Path

import jax

if __name__ == "__main__":
    port, process, count, folder, *cases = sys.argv[1:]
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=int(count), process_id=int(process))
    from tests.parity.jax_driver import run

    traces = {case: run(case, driver, jax.devices()) for case in cases for driver in ("pmap",)}
    Path(folder, f"{process}.pkl").write_bytes(pickle.dumps(traces))
