"""The plan of a step: what an algorithm sends for a model, tensor by tensor, before anything runs.

print(gradwire.plan({"layers.0.weight": (2048, 512), "layers.0.bias": (2048,)}, PowerSGD(rank=4)))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gradwire.core.algorithm import Algorithm, check_specs, innermost, require_algorithm
from gradwire.core.algorithms.two_level import levels_of
from gradwire.core.buckets.assignment import Mebibytes, ddp_buckets
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.ops import FloatDtype, Spec
from gradwire.core.plan.advice import warn
from gradwire.core.plan.dry_run import dry_run, state_bytes
from gradwire.core.plan.gathers import outgrown_at
from gradwire.core.plan.local_sgd import local_traffic, memory_bytes
from gradwire.core.plan.parameters import specs_of
from gradwire.core.plan.result import BucketPlan, LevelPlan, Plan, TensorPlan, average, kinds_of
from gradwire.core.plan.traffic import Traffic
from gradwire.core.protocol.programs import AT_REST
from gradwire.core.text.options import Replicas, checked


@checked
def plan(
    shapes: Any,
    algorithm: Algorithm | LocalSGD,
    *,
    itemsize: Literal[8, 4, 2] | None = None,
    dtype: FloatDtype | None = None,
    bucket_cap_mb: Mebibytes | None = None,
    first_bucket_mb: Mebibytes = 1,
    world_size: Replicas | None = None,
) -> Plan:
    """What one step of `algorithm` sends for a model.

        print(plan(model, PowerSGD(rank=4)))                        # a torch module
        print(plan(state.params, PowerSGD(rank=4)))                 # a tree of JAX
        print(plan(shapes, AllReduce(), bucket_cap_mb=25))          # DDP's buckets
        print(plan(shapes, AllReduce(bucket_bytes=25 << 20)))   # `all_reduce_mean(bucket_bytes=…)`

    Examples:
        >>> from gradwire import PowerSGD, plan
        >>> print(plan({"w": (512, 512), "b": (512,)}, PowerSGD(rank=4)))
        PowerSGD(rank=4)
        tensor  shape    view        rank        dense B         wire B
        w       512×512  512 | 512      4      1,048,576         16,384
        b       512      -              -          2,048          2,048
        per step: 18,432 bytes of 1,050,624 (57.0x fewer) in 2 collectives
        memory: 1,056,768 bytes on each replica

    Args:
        shapes: parameter name → shape, or anything with a `.shape`; or a torch module, without what
            is frozen in it; or a tree of arrays of JAX, in nested mappings, whose names are paths
            joined by "/". (`gradwire.jax_backend.parameter_shapes` takes every tree, and knows of
            Flax's stacks.)
        algorithm: any algorithm, or `LocalSGD`, whose averages of parameters then count as well as
            its gradients. Messages within subgroups count like those among all replicas.
        itemsize: bytes per element: 8 (float64), 4 (float32) or 2 (float16). None: the dtypes of
            the arrays; float32 for shapes.
        dtype: the dtype by name instead, for "bfloat16"; or as a framework has it.
        bucket_cap_mb: size in MiB of the buckets in which DDP or `DataParallel` hand their
            gradients over, to see them: those from the second step on, if gradients arrive in
            reverse order of the parameters. How many messages become of them is up to the group
            (`message_bytes`), so `collectives` counts the whole model as one. None: only the
            buckets that the algorithm makes itself.
        first_bucket_mb: size of the first of those. (DDP takes 1 MiB unless it is told
            `bucket_cap_mb`, which then holds for it too.)
        world_size: number of replicas, on which the bytes of a gather depend. `Zero` knows it
            itself, and a `LocalSGD` or `TwoLevel` that names groups. None:
            not known, which is refused where it is needed.

    Warns:
        CompressionWarning: much stays uncompressed, or a tensor looks like a stack; see
            `gradwire.core.plan.advice`.

    Raises:
        TypeError: `algorithm` is none, or `shapes` nothing that has names and shapes.
        ValueError: for an unknown itemsize or dtype, a size of buckets that is not positive, given
            twice, or for `LocalSGD`, or whatever the algorithm's `init` refuses.
    """
    if not isinstance(algorithm, LocalSGD):
        require_algorithm(algorithm)
    two = levels_of(algorithm)
    if world_size is None and two is not None and isinstance(two.within, tuple):
        world_size = sum(map(len, two.within))
    by_size = {8: "float64", 4: "float32", 2: "float16", None: None}
    if dtype is not None and itemsize is not None:
        raise ValueError(f"itemsize={itemsize} and dtype={dtype!r} say the same; give one of them")
    specs = specs_of(shapes, dtype or by_size[itemsize])
    check_specs(specs)
    warn(algorithm, specs)
    if isinstance(algorithm, LocalSGD) and bucket_cap_mb is not None:
        raise ValueError(
            f"bucket_cap_mb={bucket_cap_mb}, but {algorithm!r} averages parameters, which come in"
            " no buckets; leave it out"
        )
    if isinstance(algorithm, LocalSGD):  # which cannot use what a framework knows of a shape
        plain = {name: Spec(tuple(spec.shape), spec.dtype) for name, spec in specs.items()}
        return _local_plan(algorithm, plain, world_size)
    with AT_REST:  # thousands of objects for thousands of tensors
        dry = dry_run(algorithm, specs, world_size)
        inner, places = innermost(algorithm), _places(algorithm, world_size)
        near = None if two is None or world_size is None else two.near(world_size)
        one_node = (
            near is not None and len(near) == 1
        )  # between no nodes: an uncompressed average, which compresses nothing
        tensors = []
        for name, spec in specs.items():
            steps = dry.alone(name).traffic
            sent = average(
                (t.nbytes if one_node else t.far_bytes(algorithm) * places, 1) for t in steps
            )
            tensors.append(
                _tensor(inner, name, spec, name in dry.memory.tensors and not one_node, sent)
            )
        return Plan(
            algorithm,
            tuple(tensors),
            tuple(dry.traffic),
            sum(s.nbytes for s in specs.values()),
            _buckets(algorithm, specs, bucket_cap_mb, first_bucket_mb),
            outgrown_at(algorithm, specs),
            _levels(algorithm, dry.traffic, world_size),
            state_bytes(dry.memory),
            world_size,
        )


def _buckets(
    algorithm: Algorithm, specs: Mapping[str, Spec], cap_mb: float | None, first_mb: float
) -> tuple[BucketPlan, ...]:
    """Those that the algorithm makes, or those of DDP up to this size."""
    inner: Any = innermost(algorithm)
    buckets: list[list[str]] = inner.buckets(specs) if hasattr(inner, "buckets") else []
    if cap_mb is not None:
        if buckets:
            raise ValueError(
                f"bucket_cap_mb={cap_mb}, but {algorithm!r} makes its own buckets; give one of them"
            )
        buckets = ddp_buckets(specs, cap_mb, first_mb)
    return tuple(BucketPlan(tuple(names), sum(specs[n].nbytes for n in names)) for names in buckets)


def _places(algorithm: Any, world_size: int | None) -> int:
    levels = levels_of(algorithm)
    return 1 if levels is None or world_size is None else len(levels.near(world_size)[0])


def _levels(
    algorithm: Any, steps: Sequence[Traffic], world_size: int | None
) -> tuple[LevelPlan, ...]:
    levels = levels_of(algorithm)
    if levels is None or world_size is None or _places(algorithm, world_size) == 1:
        return ()
    near = levels.near(world_size)
    if len(near) == 1:  # there is nothing between
        return ()
    size = len(near[0])

    def of(groups: int, replicas: int, sent: list[tuple[int, int, int]]) -> LevelPlan:
        nbytes = average((nbytes, times) for _, nbytes, times in sent)
        return LevelPlan(
            groups, replicas, average((n, times) for n, _, times in sent), nbytes, size * nbytes
        )

    inside, between = [], []
    for step, times in kinds_of(steps):
        n, nbytes = step.in_groups(near)
        inside.append((n, nbytes, times))
        between.append((step.collectives - n, step.nbytes - nbytes, times))
    return of(len(near), size, inside), of(size, len(near), between)


def _local_plan(local: LocalSGD, specs: Mapping[str, Spec], world_size: int | None) -> Plan:
    steps, tensors = local_traffic(local, specs, world_size)
    levels = _levels(local, steps, world_size)
    inner = innermost(local.compressor)
    memory = (
        {}
        if local.compressor is None
        else dry_run(local.compressor, specs, world_size).memory.tensors
    )
    limit = None if local.compressor is None else outgrown_at(local.compressor, specs)
    planned = [
        _tensor(inner, name, spec, name in memory, tensors[name]) for name, spec in specs.items()
    ]
    return Plan(
        local,
        tuple(planned),
        steps,
        sum(s.nbytes for s in specs.values()),
        outgrown_at=limit,
        levels=levels,
        memory_bytes=memory_bytes(local, specs, world_size),
        world_size=world_size,
    )


def _tensor(algorithm: Any, name: str, spec: Spec, compressed: bool, sent: float) -> TensorPlan:
    rank = (
        algorithm.rank_of(name, spec.shape)
        if compressed and hasattr(algorithm, "rank_of")
        else None
    )
    view = str(algorithm.view_of(name, spec.shape) or "-") if hasattr(algorithm, "view_of") else ""
    return TensorPlan(name, spec.shape, compressed, rank, spec.nbytes, sent, view)
