"""Makes muloco.json: what the JAX code of MuLoCo's authors makes of a quadratic. `test_local_sgd`
compares it with gradwire's DiLoCo.

    git clone https://github.com/bentherien/muloco-1 && git -C muloco-1 checkout 33cc333
    pip install chex
    JAX_ENABLE_X64=1 python tests/core/authors/muloco.py muloco-1 > tests/core/authors/muloco.json

`muloco_wrapper` in muloco/jax/muloco.py there (MIT License) is DiLoCo for one replica. It runs as
it is, in float64. None of its code is here.
"""

import json
import sys

import numpy as np

STEPS, PERIOD, RATE, OUTER = 40, 5, 0.05, {"lr": 0.7, "momentum": 0.6}


def problem():
    """The matrix, the target and the beginning, in thousandths."""
    rng = np.random.default_rng(0)
    return [np.round(rng.standard_normal(shape), 3) for shape in ((6, 6), (6, 3), (6, 3))]


if __name__ == "__main__":
    import jax.numpy as jnp
    import optax

    sys.path.insert(0, sys.argv[1])
    from muloco.jax import muloco_wrapper

    a, target, begin = problem()
    tx = muloco_wrapper(
        optax.sgd(RATE),
        outer_lr=OUTER["lr"],
        outer_momentum=OUTER["momentum"],
        sync_interval=PERIOD,
    )
    p = jnp.array(begin)
    state, seen = tx.init(p), {}
    for step in range(1, STEPS + 1):
        updates, state = tx.update(jnp.array(a.T @ (a @ np.array(p) - target) / 6), state, p)
        p = optax.apply_updates(p, updates)
        if step % 4 == 0:
            seen[step] = p.tolist()
    print("{" + ",\n ".join(f'"{step}": {json.dumps(rows)}' for step, rows in seen.items()) + "}")
