"""The reader of compiled programs, on lines as XLA writes them."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.jax.hlo import collectives

MESH = SimpleNamespace(axis_names=("dcn", "ici"), devices=np.arange(8).reshape(2, 4))


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", {"dcn"}),
        ("{{0,1,2,3},{4,5,6,7}}", {"ici"}),
        ("{{0,2},{1,3},{4,6},{5,7}}", {"ici"}),
        ("{{0,1,2,3,4,5,6,7}}", {"dcn", "ici"}),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", set()),
        ("[2,4]<=[8]", {"ici"}),
        ("[4,2]<=[2,4]T(1,0)", {"dcn"}),
        ("[1,8]<=[8]", {"dcn", "ici"}),
    ],
)
def test_groups_in_every_spelling(groups, axes):
    text = f"  %x = f32[6,2]{{1,0}} all-reduce(%y), channel_id=1, replica_groups={groups}, use_global_device_ids=true"
    (found,) = collectives(text, MESH)
    assert found.axes == axes
    assert (found.nbytes, found.per_slice(2)) == (48, 4 * 48)


def test_kinds_and_where_they_stand():
    text = """
region_1.2 (Arg_0: f32[4]) -> f32[4] {
  %psum.1 = (bf16[4]{0}, f32[2,3]{1,0}) all-reduce-start(%a, %b), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
}
ENTRY %main.3 (p: f32[4]) -> f32[4] {
  %not-all-reduce = f32[4]{0} add(%all-reduce.1, %all-gather.1)
  %all-gather.1 = f32[8]{0} all-gather(%c), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  ROOT %reduce-scatter.1 = f32[2]{0} reduce-scatter(%d), replica_groups=[2,4]<=[8], dimensions={0}
  %collective-permute.1 = f32[5]{0} collective-permute(%e), source_target_pairs={{0,4},{4,0}}
}
"""
    found = collectives(text, MESH)
    assert [(c.kind, c.axes, c.nbytes, c.shapes, c.computation) for c in found] == [
        ("all-reduce", {"dcn"}, 32, ((4,), (2, 3)), "region_1.2"),
        ("all-gather", {"dcn"}, 32, ((8,),), "main.3"),
        ("reduce-scatter", {"ici"}, 4 * 8, ((2,),), "main.3"),
        ("collective-permute", {"dcn"}, 20, ((5,),), "main.3"),
    ]
    # A gather of n bytes counts half.
    assert found[1].per_slice(2) == 4 * 16
