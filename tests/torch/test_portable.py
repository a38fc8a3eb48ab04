"""A method in torch's own terms: refused where it is registered, for one bucket and for many,
unless it says so itself."""

from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gradwire import Compressor, State, TwoLevel, WireDtype, plan
from gradwire.core.kernels.abstract import NotPortable
from gradwire.core.protocol import mean
from gradwire.jax_backend import average_gradients
from tests.torch.compare import relative, same_bits
from tests.torch.models import loss_on, mlp
from tests.torch.training import hooked, paralleled, train

pytestmark = pytest.mark.usefixtures("alone")

WIDTHS = (40, 36, 32, 28)
LOSS = loss_on(40)
DENSE = sum(a * b + b for a, b in pairwise(WIDTHS)) * 4


@dataclass(frozen=True)
class Vote:
    """Majority vote in plain torch: the sign of the sum of signs."""

    per_replica = frozenset()
    start_step = 0
    cycle = 1

    def init(self, ops, specs):
        return State()

    def vote(self, x):
        return x.sign()

    async def step(self, ops, gradients, state, step):
        return {name: self.vote(await mean(self.vote(g))) for name, g in gradients.items()}, state


class Own(Vote):
    portable = False


class Summed(Vote):
    def vote(self, x):
        return x / x.sum()


class Linalg(Vote):
    def vote(self, x):
        return x / torch.linalg.vector_norm(x)


class Looking(Vote):
    def vote(self, x):
        return x if float(x) > 0 else x * -1.0


@dataclass(frozen=True, kw_only=True, repr=False)
class OwnCompressor(Compressor):
    """With error feedback."""

    portable = False

    def memory(self, ops, name, spec):
        return {}

    async def compress(self, ops, name, x, memory, context):
        sent = torch.sign(x) * x.abs().mean()
        return sent, await mean(sent), memory


REFUSED = [(Vote(), r"x\.sign .* ops\.sign\(x\)"), (Summed(), r"x\.sum .* column of ones"),
           (Linalg(), r"torch\.linalg\.vector_norm\(x\) .* ops\.norm\(x\)"), (Looking(), "float"),
           (WireDtype(Vote(), "int8"), r"x\.sign"), (TwoLevel(Vote(), within=1), r"x\.sign")]  # fmt: skip


@pytest.mark.parametrize("buckets", [{}, {"cap": 0.001}], ids=["one bucket", "many"])
@pytest.mark.parametrize(("algorithm", "words"), REFUSED, ids=[repr(a) for a, _ in REFUSED])
def test_what_is_not_portable_is_refused_at_registration(algorithm, words, buckets):
    with pytest.raises(ValueError, match=f"(?s)is not portable.*{words}.*portable = False"):
        hooked(mlp(*WIDTHS), algorithm, **buckets)
    with pytest.raises(NotPortable, match=words):
        plan({"w": (4, 4)}, algorithm, world_size=2)


@pytest.mark.parametrize("buckets", [{}, {"cap": 0.001}], ids=["one bucket", "many"])
def test_what_says_so_runs_as_plain_torch_and_counts_dense_bytes(buckets):
    ddp, handle = hooked(mlp(*WIDTHS), Own(), **buckets)
    trace = train(ddp, LOSS, 3)
    for given, local in zip(trace.given, trace.local, strict=True):
        assert same_bits(given, {name: g.sign() for name, g in local.items()})
    assert (
        plan(
            {n: tuple(p.shape) for n, p in mlp(*WIDTHS).named_parameters()}, Own(), itemsize=4
        ).wire_bytes
        == DENSE
    )
    assert handle.stats().bytes_sent == 3 * DENSE


@pytest.mark.parametrize(
    "algorithm",
    [OwnCompressor(), WireDtype(Own(), "bfloat16"), TwoLevel(Own(), within=1)],
    ids=repr,
)
def test_it_remembers_and_may_be_inside_another(algorithm):
    ddp, handle = paralleled(mlp(*WIDTHS), algorithm, message_bytes=0)
    train(ddp, LOSS, 3)
    if isinstance(algorithm, OwnCompressor):
        assert handle.local_error_norm() > 0


class Jax(Vote):
    def vote(self, x):
        return jnp.sign(x)


class OwnJax(Jax):
    portable = False


def test_so_it_is_in_jax():
    params = {"w": jnp.ones((4, 3))}
    with pytest.raises(ValueError, match=r"is not portable.*portable = False"):
        average_gradients(Jax(), axis_name="data").init(params)
    with pytest.raises(ValueError, match=r"x\.sum .*column of ones"):
        average_gradients(Summed(), axis_name="data").init(params)
    tx = average_gradients(OwnJax(), axis_name="data")
    state = jax.vmap(lambda _: tx.init(params), axis_name="data")(np.zeros(2))
    given = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    updates, _ = jax.vmap(tx.update, axis_name="data")({"w": given}, state)
    assert relative(updates["w"][0], np.sign(np.sign(given).mean(0))) == 0
