"""Where memory of local SGD lies in the host's: few buffers, of which torch leaves next to nothing
empty."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire import State
from gradwire.torch_backend.local_sgd.host_memory import HostMemory, in_buffers
from tests.torch.compare import same_bits

#: Parameters of GPT-2, of which three float32 each are kept.
WIDTH, LAYERS = 768, 12
LAYER = [
    3 * WIDTH * WIDTH,
    WIDTH * WIDTH,
    4 * WIDTH * WIDTH,
    4 * WIDTH * WIDTH,
    3 * WIDTH,
    4 * WIDTH,
    *[WIDTH] * 6,
]
GPT = {i: 12 * n for i, n in enumerate([50_257 * WIDTH, 1024 * WIDTH, *LAYER * LAYERS])}


def test_buffers_are_as_large_as_torch_makes_them_and_nearly_full() -> None:
    buffers = [size for size, _ in in_buffers(GPT)]
    assert all(size.bit_count() == 1 for size in buffers)
    assert sum(buffers) < 1.05 * sum(GPT.values())
    assert len(buffers) < 12


@given(st.lists(st.integers(0, 1000) | st.integers(0, 1 << 20), max_size=20))
def test_every_array_has_a_place_of_its_own(sizes: list[int]) -> None:
    found = set()
    for size, places in in_buffers(dict(enumerate(sizes))):
        end = 0
        for array, start in places.items():
            assert start % 64 == 0
            assert end <= start <= start + sizes[array] <= size
            end = start + sizes[array]
        assert found.isdisjoint(places)
        found |= places.keys()
    assert found == set(range(len(sizes)))


def test_what_is_placed_is_what_was_there_in_one_buffer() -> None:
    dtypes = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float64, "d": torch.uint8}
    tensors = {
        n: {"x": torch.arange(7).to(dtype), "y": torch.ones((), dtype=dtype)}
        for n, dtype in dtypes.items()
    }
    tensors["none"] = {}
    host = HostMemory(torch.device("cpu")).place(State({}, tensors))
    assert same_bits(host.tensors, tensors)
    assert [list(memory) for memory in host.tensors.values()] == [
        list(memory) for memory in tensors.values()
    ]
    assert (
        len(
            {
                x.untyped_storage().data_ptr()
                for memory in host.tensors.values()
                for x in memory.values()
            }
        )
        == 1
    )
