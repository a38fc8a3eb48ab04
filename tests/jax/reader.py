"""What the reader of a page on JAX has by then: `from tests.jax.reader import *` in a hidden block
of Python of the page."""
# ruff: noqa: F401, F403

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradwire
from gradwire import *
from gradwire.jax_backend import *

params = {"w": np.ones((64, 32), np.float32), "b": np.zeros(32, np.float32)}
model = SimpleNamespace(apply=None)
mesh = jax.make_mesh((jax.device_count(),), ("data",))


def loss_fn(params, batch):
    return jnp.square(batch @ params["w"] + params["b"]).mean()
