"""A check before the first step: all ranks ask for the same thing and begin with the same numbers,
or all of them raise and say what differs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradwire.core.algorithm import Algorithm, innermost
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.buckets.assignment import assign_buckets
from gradwire.core.local_sgd.schedule import Schedule
from gradwire.core.text.wording import some
from gradwire.torch_backend.engine.groups.barrier import LONGEST, Meeting
from gradwire.torch_backend.engine.groups.gathered_objects import gathered_by_all
from gradwire.torch_backend.ops.workspace import dtype_name
from gradwire.torch_backend.setup.sharded_models import INSTEAD, sharded_parameter
from gradwire.torch_backend.torch_internals import steps_in_backward

#: Tensors are broadcast in messages of about so many bytes, which is the memory that it takes.
MESSAGE_BYTES = 64 << 20
#: Ranks that a message lists.
SHOWN = 8


def describe(tensors: Mapping[str, Tensor], kind: str = "parameter") -> dict[str, str]:
    """Everything about a tensor that has to be equal on all ranks, by name."""
    described = {}
    for name, tensor in tensors.items():
        strides = "" if tensor.is_contiguous() else f", strides {tensor.stride()}"
        frozen = "" if tensor.requires_grad or kind != "parameter" else ", frozen"
        described[f"{kind} {name!r}"] = (
            f"{tuple(tensor.shape)} {dtype_name(tensor.dtype)}{strides}{frozen}"
        )
    return described


def require_initialized(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a parameter of a lazy module, which has no shape yet, or on the meta
    device, which has no numbers."""
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise ValueError(
                f"parameter {name!r} of a lazy module has no shape before the module's first"
                " forward pass: run the model on one batch, on all ranks, before this"
            )
        if tensor.is_meta:
            raise ValueError(
                f"parameter {name!r} is on the meta device, and has no numbers yet:"
                " model.to_empty(device=…), and initialize or load its weights, on all ranks,"
                " before this"
            )


def obstacle(module: nn.Module, algorithm: Algorithm, parameters: Mapping[str, Tensor]) -> str:
    """Why this rank cannot take part; "" if it can. Not raised here, or the other ranks would wait
    for this one."""
    trained = {id(p) for p in parameters.values()}
    for name, part in module.named_modules():
        sparse = isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
        if sparse and id(part.weight) in trained:
            weight = f"{name}.weight".lstrip(".")
            whom = repr(name) if name else f"the {type(part).__name__}"
            return f"parameter {weight!r} has sparse gradients; build {whom} with sparse=False"
    if name := sharded_parameter(parameters):
        return f"parameter {name!r} is a DTensor, sharded already. {INSTEAD}"
    if stepping := [name for name, p in parameters.items() if steps_in_backward(p)]:
        return (
            f"parameter {stepping[0]!r} is stepped by an optimizer in the backward pass"
            " (_apply_optimizer_in_backward), where no average of its gradient can come first but"
            " DDP's own, which takes DDP's only hook; step after the backward pass"
        )
    devices = {p.device for p in parameters.values()}
    if len(devices) != 1:
        return f"parameters are on {sorted(map(str, devices))}; one device per process is supported"
    return algorithm_obstacle(algorithm)


def algorithm_obstacle(algorithm: Algorithm, *, in_buckets: bool = True) -> str:
    """Why an algorithm cannot average gradients that come bucket by bucket, or all at once; "" if
    it can."""
    if isinstance(algorithm, Schedule):
        return (
            f"{algorithm!r} averages parameters, after steps of the optimizer; give both to"
            " gradwire.torch_backend.local_sgd"
        )
    if type(algorithm).__repr__ is object.__repr__:
        return (
            f"algorithm {type(algorithm).__name__} has no repr to compare its options by; make it a"
            " frozen dataclass"
        )
    inner = innermost(algorithm)
    if in_buckets and isinstance(inner, AllReduce) and inner.bucket_bytes is not None:
        return (
            f"bucket_bytes={inner.bucket_bytes} of {algorithm!r} means nothing here, where"
            " gradients arrive in buckets already; set their size with bucket_cap_mb, of"
            " DistributedDataParallel or DataParallel"
        )
    return ""


def meet_to_change(meetings: Iterable[Meeting]) -> None:
    """Raise RuntimeError if some ranks do not come to change what is done: their messages would
    meet those of a step."""
    for meeting in meetings:
        meeting.come(
            "reconfigure() or unregister()",
            "Every rank calls it, between the same two steps; those others have not, and may be in"
            " a backward pass",
            longest=LONGEST,
        )


def require_same_on_all_ranks(
    group: dist.ProcessGroup,
    settings: Mapping[str, str],
    parameters: Mapping[str, str],
    obstacle: str = "",
    device: torch.device | None = None,
) -> None:
    """Compare with all ranks; without this the first step would hang, or average what does not
    belong together. Parameters are from `describe`, in order. NCCL carries objects by way of the
    current device, which need not be that of the parameters.

    Raises:
        ValueError: on every rank, if one of them has an obstacle or differs from rank 0. It says
            which ranks, in what.
    """
    # Each rank receives all of it: texts, which may name every rank, only where they differ.
    everyone = gathered_by_all((obstacle, _digest(settings), _digest(parameters)), group, device)
    if obstacle:
        raise ValueError(obstacle)
    for rank, (theirs, *_) in enumerate(everyone):
        if theirs:
            raise ValueError(f"rank {rank} cannot take part: {theirs}")
    if len({digest for _, digest, _ in everyone}) > 1:
        texts = gathered_by_all(dict(settings), group, device)
        for key in dict.fromkeys(key for own in texts for key in own):
            first = texts[0].get(key)
            different = {
                rank: own.get(key) for rank, own in enumerate(texts) if own.get(key) != first
            }
            if different:
                shown = some(different.items(), SHOWN, lambda other: f"{other[0]}: {other[1]!r}")
                raise ValueError(f"ranks differ in {key}: rank 0 has {first}, others {{{shown}}}")
    if len({digest for *_, digest in everyone}) > 1:
        lists = gathered_by_all(dict(parameters), group, device)
        found = {rank: _difference(theirs, lists[0]) for rank, theirs in enumerate(lists)}
        differing = [(rank, what) for rank, what in found.items() if what]
        others = some(differing, SHOWN, lambda other: f"{other[0]}: {other[1]}")
        raise ValueError(f"ranks differ in parameters: compared with rank 0, others {{{others}}}")


def copy_from_first_rank(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite tensors of any dtypes with those of the group's rank 0: a broadcast for every 64
    MiB of a dtype."""
    source = dist.get_global_rank(group, 0)
    plain = [t.detach() for t in tensors]
    sizes = [t.numel() * t.element_size() for t in plain]
    with torch.no_grad():
        for bucket in assign_buckets(sizes, [MESSAGE_BYTES], [(t.dtype, t.device) for t in plain]):
            members = [plain[i] for i in bucket if plain[i].numel()]
            if not members:
                continue
            flat = torch.cat([t.reshape(-1) for t in members])
            # As bytes: libraries do not know all dtypes that a buffer may have.
            dist.broadcast(flat.view(torch.uint8), source, group=group)
            for t, received in zip(
                members, torch.split(flat, [t.numel() for t in members]), strict=True
            ):
                t.copy_(received.view(t.shape))


def _difference(theirs: Mapping[str, str], first: Mapping[str, str]) -> str:
    parts = []
    if lacking := [name for name in first if name not in theirs]:
        parts.append(f"lacks {some(lacking, written=str)}")
    if more := [name for name in theirs if name not in first]:
        parts.append(f"has besides {some(more, written=str)}")
    if other := [name for name in first if name in theirs and theirs[name] != first[name]]:
        parts.append(
            "has "
            + some(
                [f"{name} as {theirs[name]} instead of {first[name]}" for name in other],
                written=str,
            )
        )
    if not parts and list(theirs) != list(first):
        parts.append("has the same in another order; register modules in one order everywhere")
    return " and ".join(parts)


def _digest(described: Mapping[str, str]) -> str:
    lines: Iterable[str] = (f"{name} {what}" for name, what in described.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
