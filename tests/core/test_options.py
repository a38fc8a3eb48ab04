"""Options by their annotations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from gradwire import OuterSGD
from gradwire.core.text.options import OWN_CHECK, Names, at_least, check, more_than, share


class Thing:
    def __repr__(self) -> str:  # in the names of tests, which all processes have to give alike
        return "Thing()"


TAKEN: list[tuple[Any, Any, Any]] = [
    (int, 3, 3),
    (int, np.int64(3), 3),
    (int, np.array(3), 3),
    (float, 2, 2),
    (float, np.float32(0.5), 0.5),
    (bool, True, True),
    (str, "a", "a"),
    (int | None, None, None),
    (Annotated[int, at_least(1)] | None, 1, 1),
    (Annotated[float, more_than(0)], 1e-9, 1e-9),
    (Annotated[float, share(most_open=True)], 0, 0),
    (Literal["keep", "drop"], "keep", "keep"),
    (float | Literal["progress"], "progress", "progress"),
    (tuple[int, int], [2, np.int32(3)], (2, 3)),
    (tuple[str, ...], ("a", "b"), ("a", "b")),
    (Mapping[str, Annotated[int, at_least(0)]], {"*": 0}, {"*": 0}),
    (Sequence[int], [1, 2], [1, 2]),
    (Thing | None, None, None),
    (Literal[2, 4], np.int8(4), 4),
    (Mapping[str, int], {"a": np.int64(1)}, {"a": 1}),
    (Annotated[Any, Names(("a",), str.lower)], "A", "a"),
    (type[Thing], Thing, Thing),
    (float, 1 << 60, float(1 << 60)),
    (Any, object, object),
]


@pytest.mark.parametrize(("hint", "value", "expected"), TAKEN, ids=repr)
def test_what_fits_is_taken_as_pythons_own(hint, value, expected):
    new = check("x", value, hint)
    assert new == expected
    assert type(new) is type(expected)
    assert check("x", new, hint) == new


REFUSED: list[tuple[Any, Any, type[Exception]]] = [
    (int, True, TypeError),
    (int, 1.0, TypeError),
    (int, "1", TypeError),
    (int, np.array([1]), TypeError),
    (float, False, TypeError),
    (float, float("nan"), ValueError),
    (float, np.float64("inf"), ValueError),
    (float, "0.5", TypeError),
    (float, 1j, TypeError),
    (bool, "False", TypeError),
    (bool, 0, TypeError),
    (bool, np.bool_(True), TypeError),
    (str, b"a", TypeError),
    (Annotated[int, at_least(1)], 0, ValueError),
    (Annotated[int, at_least(1)] | None, 0, ValueError),
    (Annotated[int, at_least(1, 8)], 9, ValueError),
    (Annotated[float, more_than(0)], 0, ValueError),
    (Annotated[float, share(most_open=True)], 1.0, ValueError),
    (Literal["keep", "drop"], "kept", ValueError),
    (Literal["keep", "drop"], 1, TypeError),
    (tuple[int, int], (1,), ValueError),
    (tuple[int, int], "12", TypeError),
    (tuple[str, ...], "ab", TypeError),
    (tuple[str, ...], ("a", 1), TypeError),
    (Mapping[str, int], [("a", 1)], TypeError),
    (Mapping[str, int], {"a": 1.5}, TypeError),
    (Sequence[int], 3, TypeError),
    (Thing, 1, TypeError),
    (Thing | None, "x", TypeError),
    (float, 10**400, ValueError),
    (Annotated[Any, Names(("a",), str.lower)], "b", ValueError),
    (Annotated[Any, Names(("a",), str.lower)], 3, TypeError),
    (type[Thing], int, TypeError),
    (type[Thing], Thing(), TypeError),
]


@pytest.mark.parametrize(("hint", "value", "error"), REFUSED, ids=repr)
def test_what_does_not_is_refused_by_name(hint, value, error):
    with pytest.raises(error) as refused:
        check("rank", value, hint)
    assert "rank" in str(refused.value)
    assert type(refused.value) is error


def test_what_only_a_function_knows_is_not_checked():
    """Annotations of a class that is made in a function, of which only that function knows: what its base has is checked still."""

    @dataclass(frozen=True)
    class Inner(OuterSGD):
        own: "Unknown" = 0  # noqa: F821

    assert Inner(3, own="x").own == "x"
    with pytest.raises(ValueError, match="lr=0"):
        Inner(0)


def test_advice_ends_the_message():
    with pytest.raises(ValueError, match=r"or None$") as refused:
        check("rank", 0, Annotated[int, at_least(1), "1 to 32 are usual"] | None)
    assert "1 to 32 are usual" in str(refused.value)


def test_what_says_by_itself_what_it_takes_is_asked():
    def even(value, name):
        if value % 2:
            raise ValueError(f"{name} is odd")

    assert check("size", 4, Annotated[int, even]) == 4
    with pytest.raises(ValueError, match="size is odd"):
        check("size", 3, Annotated[int, even])
    assert check("size", "any", Annotated[int, OWN_CHECK]) == "any"


def test_a_value_that_cannot_be_shown_is_refused_too():
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(TypeError, match="rank=<"):
        check("rank", Silent(), int)
    with pytest.raises(TypeError, match="a list"):
        check("rank", list(range(1000)), int)
