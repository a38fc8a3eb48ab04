"""Blocks of parameters in a saved state: named, put together, and cut anew. Of models: test_fsdp_checkpoint.py."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.algorithm import State
from gradwire.torch_backend.state.blocks import Piece, parameter_of, recut

HEAD = {"format": 1, "kind": "compressor", "algorithm": "A()", "step": 3, "replicas": 2, "shared": {}}
N, M, R = 12, 5, 2


def cut(shards, length=N, axis=0):
    each = -(-length // shards)
    starts = [min(s * each, length) for s in range(shards)]
    return [Piece(axis, start, min(start + each, length), length) for start in starts]


def numbers(*shape, start=0):
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


ERROR = numbers(2, N, M)  # of two replicas


def saved(pieces, name="w"):
    """A state of a parameter (N, M) in these blocks; those without a row are not compressed."""
    state = {**HEAD, "tensors": {}, "local": {}}
    for i, piece in enumerate(pieces):
        if piece.size:
            block = piece.name(name)
            state["tensors"][block] = {"q": torch.full((R, M), float(i)), "p": torch.full((R, piece.size), float(i))}
            state["local"][block] = {"error": ERROR.narrow(piece.axis + 1, piece.start, piece.size)}
    return state


def memory(piece):
    shape = [N, M]
    shape[piece.axis] = piece.size
    here = {"q": torch.full((R, M), -1.0), "p": torch.full((R, piece.size), -1.0), "error": torch.zeros(shape)}
    return State({}, {"w": {key: x.double() for key, x in here.items()}})


def test_a_block_is_called_by_its_indices():
    for piece, name in ((Piece(0, 3, 6, 12), "a.w[3:6]"), (Piece(1, 0, 5, 12), "a.w[:, 0:5]")):
        assert piece.name("a.w") == name
        parameter, found = parameter_of(name)
        assert (parameter, found.axis, found.start, found.stop) == ("a.w", piece.axis, piece.start, piece.stop)
    assert Piece(0, 0, 12, 12).name("a.w") == "a.w"
    assert parameter_of("a.w") == ("a.w", None)


@given(st.integers(1, 13), st.integers(1, 13), st.sampled_from([0, 1]))
def test_errors_are_put_together_and_cut_again(before, after, axis):
    state = saved(cut(before))
    for piece in cut(after, (N, M)[axis], axis):
        found = recut(state, {"w": piece}, memory(piece))
        assert found["local"]["w"]["error"].equal(ERROR.narrow(axis + 1, piece.start, piece.size))
        assert list(found["tensors"]) == ["w"]


def test_another_block_begins_with_the_factor_of_the_one_it_shares_most_with():
    # Of blocks of 4 rows, those of 3 rows share most with 0, 0 or 1, 1, 2; factors of rows begin anew.
    for piece, ones in zip(cut(4), ({0.0}, {0.0, 1.0}, {1.0, 2.0}, {2.0}), strict=True):
        found = recut(saved(cut(3)), {"w": piece}, memory(piece))["tensors"]["w"]
        assert set(found["q"].flatten().tolist()) <= ones
        assert set(found["p"].flatten().tolist()) == {-1.0}


def test_a_whole_parameter_is_cut_like_its_blocks():
    state = saved([Piece(0, 0, N, N)])
    state["tensors"]["w"]["outer"] = numbers(N, M)
    for piece in cut(3):
        here = memory(piece)
        here.tensors["w"]["outer"] = torch.zeros(piece.size, M)
        found = recut(state, {"w": piece}, here)["tensors"]["w"]
        assert found["outer"].equal(numbers(N, M)[piece.start : piece.stop])
        assert found["q"].equal(state["tensors"]["w"]["q"])


def test_blocks_that_are_not_compressed_have_no_error_and_take_none():
    state = saved(cut(3))
    del state["tensors"]["w[4:8]"], state["local"]["w[4:8]"]
    found = recut(state, {"w": Piece(0, 2, 10, N)}, memory(Piece(0, 2, 10, N)))["local"]["w"]["error"]
    assert found[:, 2:6].eq(0).all()
    assert found[:, :2].equal(ERROR[:, 2:4])
    found = recut(saved(cut(3)), {"w": Piece(0, 0, 1, N)}, State({}, {}))
    assert found["tensors"] == found["local"] == {}


def test_what_is_of_another_model_stays_to_be_seen():
    piece = cut(3)[0]
    state = saved(cut(3))
    other = saved(cut(3), "v")
    state["tensors"] |= other["tensors"]
    state["local"] |= other["local"]
    assert set(recut(state, {"w": piece}, memory(piece))["tensors"]) == {"w", "v[0:4]", "v[4:8]", "v[8:12]"}
    narrower = memory(piece)
    narrower.tensors["w"]["error"] = narrower.tensors["w"]["error"][:, :3]
    assert "w" not in recut(state, {"w": Piece(0, 0, 5, N)}, narrower)["local"]


def test_a_parameter_that_is_called_like_a_block_is_whole():
    state = {**HEAD, "tensors": {"w[0:2]": {"q": numbers(R, M)}}, "local": {"w[0:2]": {"error": ERROR}}}
    current = State({}, {"w[0:2]": {"q": numbers(R, M), "error": ERROR[0]}})
    assert recut(state, {}, current) == state
