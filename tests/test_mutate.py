"""What `make mutate` changes, and that a seed says what; what `make mutate-emulated` changes."""

import ast

import pytest

from tests.emulated import mutations
from tests.mutate import ROOT, draw, everything, mutated, places

pytestmark = pytest.mark.slow

SOURCE = '''
def f(x: int = 2, *, y: bool = True) -> int:
    """Text."""
    if x < 1 and not y:
        raise ValueError(f"{x + 1}")
    total: float = -x * 3
    while y:
        print(total)
        total += 1 if x is None else 2
    return total
'''


def test_each_place_is_another_program() -> None:
    found = places(SOURCE)
    programs = {ast.unparse(ast.parse(mutated(SOURCE, number))) for number in range(len(found))}
    assert len(programs) == len(found)
    assert ast.unparse(ast.parse(SOURCE)) not in programs
    assert sorted(line for line, _ in found) == [2, 2, *[4] * 5, *[6] * 3, 7, 8, *[9] * 4]


def test_a_seed_draws_the_same_from_all_rooms() -> None:
    drawn = draw(1, 60)
    assert drawn == draw(1, 60)
    assert drawn != draw(2, 60)
    assert len({(m.file, m.number) for m in drawn}) == 60
    assert {m.file.rpartition("/")[0] for m in draw(1, 1000)} == set(everything())
    for mutation in drawn[:20]:
        source = (ROOT / mutation.file).read_text()
        assert ast.dump(ast.parse(mutated(source, mutation.number))) != ast.dump(ast.parse(source))


@pytest.mark.parametrize("count", [1, 59, 61, 397])
def test_as_many_are_drawn_as_are_asked_for(count: int) -> None:
    assert len(set(draw(1, count))) == count
    few = "core/codecs"
    assert len(draw(1, 10**6, few)) == sum(map(len, everything(few).values()))


@pytest.mark.parametrize("name", mutations.MUTATIONS)
def test_each_mutation_for_the_accelerator_has_one_place(name: str) -> None:
    file, source = mutations.mutated(mutations.MUTATIONS[name])
    assert ast.dump(ast.parse(source)) != ast.dump(ast.parse(file.read_text()))


@pytest.mark.parametrize(
    ("pattern", "becomes", "expected"),
    [
        ("X < 1", "X <= 1", "if x <= 1 and (not y)"),
        ("print(X)", "pass", "pass"),
        ("total += X", "total += 2 * (X)\nprint(X)", "total += 2 * (1 if x is None else 2)"),
        ("while X:\n    print(Y)\n    Z += A", "print(X, Y)", "print(y, total)"),
        ("-x * 3", "x", "total: float = x"),
        ("A and B", "B", "if not y:"),
    ],
)
def test_a_pattern_becomes_something_else(pattern: str, becomes: str, expected: str) -> None:
    change = mutations.Change(pattern, becomes)
    source = ast.unparse(change.generic_visit(ast.parse(SOURCE)))
    assert change.places == 1
    assert expected in source
    assert "(X" not in source


def test_a_pattern_that_is_nowhere_is_refused() -> None:
    mutation = mutations.changed("Pending.wait", "self.nowhere()", "pass", mutations.SHARDED)
    with pytest.raises(ValueError, match=r"0 places of Pending\.wait"):
        mutations.mutated(mutation)
    with pytest.raises(ValueError, match="0 functions called nobody"):
        mutations.mutated(mutations.changed("nobody", "X", "Y", mutations.SHARDED))
