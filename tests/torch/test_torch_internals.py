"""What is private of torch stands in one file, and what a version cannot is refused where it is
registered. On each row of `make test-versions`."""

import ast
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import gradwire.torch_backend as gw
from gradwire import AllReduce, LocalSGD
from gradwire.torch_backend import torch_internals
from gradwire.torch_backend.torch_internals import (
    MUON,
    SHARDED_MODELS,
    Feature,
    NeedsTorch,
    fsdp_accumulates,
)
from tests.launch import ROOT
from tests.torch.compare import said

#: Private names of other libraries, and in which folder of torch_backend.
OTHERS = {
    "_group_world_size": "elastic",
    "_pg": "elastic",
    "_quorum_id": "elastic",
    "_replica_world_size_mode": "elastic",
    "_use_async_quorum": "elastic",
    "_user_state_dicts": "elastic",
    "_load_optimizer_and_scheduler": "integrations",
    "_prepare_inputs": "integrations",
    "_save_optimizer_and_scheduler": "integrations",
}


LOOK_UP = ("getattr", "hasattr", "setattr", "delattr")


def private(name):
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def own_names(trees):
    """What the package itself calls so."""
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    yield node.attr
            elif isinstance(node, (ast.Name, ast.arg)):
                yield node.id if isinstance(node, ast.Name) else node.arg


def named_privately(tree, own):
    """Private names that are not the package's: imported, after a dot, or looked up by a string;
    and any below a module of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("gradwire"):
            yield from (
                f"{node.module}.{each.name}"
                for each in node.names
                if private(f"{node.module}.{each.name}")
            )
        elif isinstance(node, ast.Attribute) and private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if node.attr not in own or (
                isinstance(root, ast.Name) and root.id in ("torch", "dist")
            ):
                yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in LOOK_UP:
            name = getattr(node.args[1], "value", None)
            if (
                isinstance(name, str)
                and private(name)
                and getattr(node.args[0], "id", "") != "self"
            ):
                yield name


def test_what_is_private_of_torch_is_named_in_one_file():
    files = sorted((ROOT / "torch_backend").rglob("*.py"))
    trees = {file: ast.parse(file.read_text()) for file in files}
    own = {name for name in own_names(trees.values()) if private(name)}
    (home,) = (file for file in files if file.stem == "torch_internals")
    assert {"_world", "_comm_hooks", "torch.utils._pytree"} < set(
        named_privately(trees.pop(home), own)
    )
    found = {
        (name, file.relative_to(ROOT))
        for file, tree in trees.items()
        for name in named_privately(tree, own)
    }
    assert {(name, file) for name, file in found if OTHERS.get(name) not in file.parts} == set()
    assert {name for name, _ in found} == set(OTHERS)


def test_versions_are_those_that_have_it():
    assert SHARDED_MODELS.there == hasattr(FSDPModule, "set_all_reduce_hook")
    assert MUON.there == hasattr(torch.optim, "Muon")


def test_the_page_says_what_which_version_has():
    page = (ROOT / "docs" / "how-to" / "questions.md").read_text()
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| ")]
    said_of = {
        since.strip().removeprefix("torch "): what
        for what, since in rows
        if since.strip().startswith("torch ")
    }
    features = [each for each in vars(torch_internals).values() if isinstance(each, Feature)]
    assert said_of.keys() > {torch_internals.TESTED[0], *(each.since for each in features)}
    for each in features:
        assert f"`{each.uses.split('.')[-1]}`" in said_of[each.since]


def sharded():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    return fully_shard(nn.Linear(4, 4), mesh=mesh["shard"]), mesh["replicate"]


def replicas(model, mesh):
    gw.compress_replicas(model, AllReduce(), mesh)


def local(model, mesh):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gw.local_sgd(model, optimizer, LocalSGD(2), process_group=mesh.get_group())


def muon(model, mesh):
    rules = {"weight": ("Muon", {}, "parameter"), "*": (torch.optim.AdamW, {}, "element")}
    gw.ZeroOptimizer(model.named_parameters(), rules)


def muon_by_class(model, mesh):
    gw.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, shard="parameter")


DOORS = {
    "compress_replicas": (replicas, SHARDED_MODELS),
    "local_sgd": (local, SHARDED_MODELS),
    "Muon": (muon, MUON),
    "DTensors": (muon_by_class, MUON),
}


@pytest.mark.parametrize("door", DOORS)
def test_an_older_torch_is_refused_where_it_is_registered(alone, door, monkeypatch):
    """On the torch that is here, and as if it were the oldest. Nothing is left behind."""
    enter, feature = DOORS[door]
    model, mesh = sharded()
    hooks = len(model._forward_hooks)
    if not feature.there:
        with pytest.raises(NeedsTorch):
            enter(model, mesh)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.6.0+cpu")
        with pytest.raises(NeedsTorch) as refused:
            enter(model, mesh)
    for part in (feature.uses, f"since {feature.since}", "this is torch 2.6.0+cpu"):
        assert part in str(refused.value)
    assert len(model._forward_hooks) == hooks
    if feature.there and door != "DTensors":
        enter(model, mesh)


def test_a_torch_that_keeps_it_elsewhere_is_refused_where_it_is_registered(alone):
    """And not in the first backward pass."""
    model, mesh = sharded()
    gone = mock.patch.object(
        torch_internals, "fsdp_groups", side_effect=AttributeError("no attribute '_groups'")
    )
    newest = mock.patch.object(torch, "__version__", "9.9.0")
    for enter in (replicas, local):
        with gone, newest:
            heard = said(enter, model, mesh)
        assert "torch 9.9.0 keeps elsewhere (no attribute '_groups')" in heard
        assert "torch 2.7 to 2.15 are tested" in heard


@pytest.mark.parametrize("kept", ["_fsdp_param_group", "_fsdp_param_groups"])
def test_fsdp_is_read_as_each_version_keeps_it(kept):
    """One group or none before torch 2.12, and a list since."""

    def module(last, *averaging):
        groups = [SimpleNamespace(all_reduce_grads=each) for each in averaging]
        held = groups if kept.endswith("s") else groups[0] if groups else None
        state = SimpleNamespace(_state_ctx=SimpleNamespace(is_last_backward=last), **{kept: held})
        return SimpleNamespace(_get_fsdp_state=lambda: state)

    assert not fsdp_accumulates(module(True))
    assert not fsdp_accumulates(module(True, True))
    assert fsdp_accumulates(module(True, False))
    assert fsdp_accumulates(module(False, True))
