"""Lists in messages."""

import pytest

from gradwire.core.text.wording import some


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([], "none"),
        (["a"], "'a'"),
        (["a", "b"], "'a', 'b'"),
        (["a", "b", "c"], "'a', 'b' and 1 more"),
        ((letter for letter in "abcd"), "'a', 'b' and 2 more"),
        ([(2, 3), (4,)], "(2, 3), (4,)"),
    ],
)
def test_the_first_are_named_and_the_others_counted(items, said):
    assert some(items, 2) == said


def test_written_as_one_likes():
    assert some(["a", "b"], 1, str) == "a and 1 more"
