"""Finding tensors in outputs, and parameters behind tensors."""

import enum
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from gradwire.torch_backend.ddp.autograd_graph import reached, tensors_in

A, B, C = (torch.full((1,), float(i)) for i in range(3))
Pair = namedtuple("Pair", "first second")


class Colour(enum.Enum):
    RED = 1


@dataclass
class Output:
    loss: object
    hidden: object = None


@dataclass
class Slotted:
    __slots__ = ("x", "y")
    x: object
    y: object


@dataclass
class Both(OrderedDict):
    """As transformers' outputs are: a dictionary and a dataclass at once."""

    loss: object = None
    later: object = field(default=None, init=False)


class Opaque:
    def __init__(self, x):
        self.x = x


NESTED = {
    "tensor": (A, [A]),
    "tuple": ((A, B), [A, B]),
    "nested": ([(A, {"x": [B, {"y": C}]})], [A, B, C]),
    "named tuple": (Pair(A, [B]), [A, B]),
    "mappings": (OrderedDict(x=A, y=defaultdict(list, z=[B])), [A, B]),
    "read-only mapping": (MappingProxyType({"x": A}), [A]),
    "set": ({A}, [A]),
    "dataclass": (Output(A, {"layers": (B, C)}), [A, B, C]),
    "dataclass in a dataclass": (Output(Output(A), [Output(B)]), [A, B]),
    "slots": (Slotted(A, [B]), [A, B]),
    "dictionary and dataclass": (Both(loss=A), [A]),
    "namespace": (SimpleNamespace(x=A, y=[B]), [A, B]),
    "packed sequence": (nn.utils.rnn.pack_sequence([A]), [A]),
    "nothing": (
        (None, 1, 2.0, 1j, "x", b"x", True, Colour.RED, torch.float32, torch.Size([1]), np.ones(2)),
        [],
    ),
    "empty": (([], {}, ()), []),
}


@pytest.mark.parametrize(("outputs", "expected"), NESTED.values(), ids=NESTED)
def test_tensors_are_found_in_containers(outputs, expected):
    found = tensors_in(outputs)
    floats = [t for t in found.tensors if t.is_floating_point()]
    assert [float(t) for t in floats] == [float(t) for t in expected]
    assert not found.opaque


def test_what_cannot_be_looked_into_is_named_and_a_container_may_hold_itself():
    found = tensors_in({"x": [Opaque(A)], "y": B})
    assert (found.tensors, found.opaque) == ([B], {"Opaque"})
    loop = [A]
    loop.append(loop)
    assert tensors_in(loop).tensors == [A]


def test_parameters_behind_tensors():
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    numbers = {p: i for i, p in enumerate(layers.parameters())}
    x = torch.ones(1, 2)
    y = layers[1](layers[0](x))
    with torch.no_grad():
        unseen = layers[0](x)
    for tensors, expected in (
        ([y], {0, 1, 2, 3}),
        ([y, layers[3](x).sum()], {0, 1, 2, 3, 6, 7}),
        ([layers[2](y.detach())], {4, 5}),
        ([y @ layers[2].weight], {0, 1, 2, 3, 4}),
        ([x, y.detach(), unseen], set()),
        ([layers[0].bias], {1}),
    ):
        assert reached(tensors, numbers) == expected
    p = nn.Parameter(torch.ones(1))
    y = p * 1
    for _ in range(20_000):  # a deep graph needs no deep stack
        y = y + 0
    assert reached([y], {p: 0}) == {0}
