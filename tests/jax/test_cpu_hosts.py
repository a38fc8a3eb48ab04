"""Messages in short pieces, as between CPU hosts: the same bits, in as many collectives."""

import jax
import numpy as np
import optax
import pytest

import gradwire.jax_backend as gw
from gradwire import PowerSGD, TopK
from gradwire.jax_backend.axes import cpu_hosts
from gradwire.jax_backend.engine import driver
from tests.jax.replicas import AXIS, Replicas, gradients

SHAPES = {"w": (9, 14), "b": (7,)}
SENDS = {
    "zero1": lambda: gw.zero1(optax.sgd(0.1), axis_name=AXIS, replicas=3),
    "gather": lambda: gw.average_gradients(TopK(keep=0.2), axis_name=AXIS),
    "reduce": lambda: gw.average_gradients(PowerSGD(2), axis_name=AXIS),
}


@pytest.mark.parametrize("mode", ["vmap", "shard_map_vma"])
@pytest.mark.parametrize("what", SENDS)
def test_pieces_make_the_bits_of_the_whole(what, mode, monkeypatch):
    params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}

    def two_steps():
        replicas = Replicas(SENDS[what](), params, 3, mode)
        return [replicas.update(gradients(SHAPES, step, 3)) for step in range(2)]

    def pieces():
        tx = SENDS[what]()
        return gw.collective_traffic(tx.update, params, jax.eval_shape(tx.init, params), axis_env=[(AXIS, 3)])

    whole, messages = two_steps(), pieces()
    for module in (cpu_hosts, driver):
        monkeypatch.setattr(module, "between_cpu_hosts", lambda: True)
    monkeypatch.setattr(cpu_hosts, "SHORT", 40)
    jax.tree.map(np.testing.assert_array_equal, two_steps(), whole)
    cut = pieces()
    assert any(message.repeats > 1 for message in cut) is (what != "reduce")
    assert len(cut) == len(messages)
