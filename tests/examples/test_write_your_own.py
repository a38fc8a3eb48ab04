"""The researcher's examples need NumPy alone, and are what they say."""

import re
import sys

import pytest

from gradwire import PowerSGD
from gradwire.testing import check
from tests.examples.conftest import EXAMPLES, examples_importable

with examples_importable():
    from two_more_methods import RandomProjection, TopRows
    from write_your_own import RandomElements


@pytest.mark.parametrize("method", [RandomElements(every=4), RandomProjection(2), TopRows(4)], ids=repr)
def test_each_keeps_all_promises_that_a_shipped_method_keeps(method):
    assert check(method) == check(PowerSGD(2), world_sizes=(2,))


@pytest.mark.slow
def test_it_runs_with_numpy_alone(start, tmp_path):
    alone = tmp_path / "alone.py"
    alone.write_text(
        "import runpy, sys\n"
        "for name in ('torch', 'jax', 'flax', 'optax'): sys.modules[name] = None\n"  # importing it fails
        f"runpy.run_path({str(EXAMPLES / 'write_your_own.py')!r}, run_name='__main__')\n"
    )
    output = start(alone, python=sys.executable).finish()
    rows = re.findall(r"^(\w+)\(.*\) +([\d,]+) bytes +(\d) messages? +([\d.]+)%$", output, re.MULTILINE)
    assert [name for name, *_ in rows] == ["AllReduce", "PowerSGD", "RandomElements"]
    sent = [int(n.replace(",", "")) for _, n, _, _ in rows]
    per_step = [4 * 2 * (256 * 64 + 256), 4 * 2 * (256 * 8 + 64 * 8 + 256), 4 * 2 * (256 * 64 // 8 + 256)]  # float64
    assert sent == [200 * n for n in per_step]
    assert [messages for _, _, messages, _ in rows] == ["1", "2", "1"]
    assert all(float(error) < 1 for *_, error in rows)
