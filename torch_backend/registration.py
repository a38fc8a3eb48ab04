"""What every front door does before the first step: try the algorithm out, compare with all ranks, make process groups, say what will be done."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gradwire.core.algorithm import Algorithm, require_algorithm
from gradwire.core.checkpoint import StateMismatch
from gradwire.core.local_sgd.schedule import Schedule
from gradwire.core.ops import Spec
from gradwire.core.patterns import UnmatchedPattern, matches
from gradwire.core.plan.advice import warn
from gradwire.core.plan.dry_run import partitions, requests_by_step, summary
from gradwire.core.programs import Groups, UnknownRequest
from gradwire.core.requests import AllGather, OptimizerStep, ReduceScatter, ReplicaIndex, SumScalar
from gradwire.torch_backend.drive import Driver, specs_of
from gradwire.torch_backend.process_groups import ProcessGroups
from gradwire.torch_backend.rank_checks import algorithm_obstacle, describe, require_same_on_all_ranks

__all__ = ["announce", "in_one_line", "prepared", "reconfigured", "require_gradient_algorithm", "tried"]

#: What `gradwire.torch_backend.drive` does not answer: requests of optimizers with sharded state.
SHARDED = (ReduceScatter, AllGather, ReplicaIndex, SumScalar, OptimizerStep)

logger = logging.getLogger("gradwire")


def require_gradient_algorithm(algorithm: object) -> None:
    """Raise TypeError for what is no algorithm. A schedule is one for `local_sgd`, which `rank_checks.obstacle` says."""
    if not isinstance(algorithm, Schedule):
        require_algorithm(algorithm)


def prepared(
    algorithm: Algorithm,
    parameters: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    settings: Mapping[str, str],
    obstacle: str,
    *,
    described: Mapping[str, str] | None = None,
    frozen: Collection[str] = (),
) -> ProcessGroups:
    """Compare with all ranks, and make the groups that the algorithm averages in.

    Args:
        algorithm: on this rank.
        parameters: those that are averaged.
        group: of all replicas.
        settings: what else has to be equal on all ranks.
        obstacle: why this rank cannot take part; "" if it can.
        described: what is compared of tensors. None: the parameters.
        frozen: names of parameters that are not averaged.

    Raises:
        ValueError: on all ranks, if one cannot take part or they differ.
    """
    groups: list[Groups] = []
    if not obstacle:
        groups, obstacle = tried(algorithm, specs_of(parameters), dist.get_world_size(group), frozen)
    settings = {"algorithm": repr(algorithm), **settings, "groups": str(groups)}
    device = next((p.device for p in parameters.values()), None)
    described = describe(parameters) if described is None else described
    require_same_on_all_ranks(group, settings, described, obstacle, device)
    return ProcessGroups(group, groups)


def tried(
    algorithm: Algorithm, specs: Mapping[str, Spec], replicas: int, frozen: Collection[str] = ()
) -> tuple[list[Groups], str]:
    """Run the steps of an algorithm without data: the groups that it averages in, and why it cannot be run here, or "".

    One that is written for torch's tensors alone (`x.sign()`) cannot be tried, and has no groups.
    """
    try:
        requests = [request for step in requests_by_step(algorithm, specs, replicas) for request in step]
        for request in requests:
            if isinstance(request, SHARDED):
                return [], (
                    f"{algorithm!r} asks for {type(request).__name__}, which nobody answers while gradients are averaged; "
                    "gradwire.torch_backend.ZeroOptimizer has the driver of sharded optimizers"
                )
        return partitions(requests, replicas), ""
    except UnmatchedPattern as error:
        fits = [name for name in frozen if matches(name, error.pattern)]
        if not fits:
            return [], str(error)
        more = f" and {len(fits) - 1} more" if fits[1:] else ""
        return [], (
            f"{error.option} pattern {error.pattern!r} fits frozen parameters only, {fits[0]!r}{more}, which have no gradient to average; "
            "leave it out"
        )
    except (ValueError, UnknownRequest) as error:
        return [], str(error)
    except Exception:
        return [], ""


def announce(driver: Driver, *, hint: str = "") -> None:
    """Warn of what stays uncompressed, and log in one line what is done, on the first rank."""
    warn(driver.algorithm, driver.specs, hint)
    if logger.isEnabledFor(logging.INFO) and dist.get_rank(driver.process_group) == 0:
        logger.info("%s", in_one_line(driver))


def in_one_line(driver: Driver) -> str:
    """What it does; the `repr` alone of an algorithm that cannot be tried without data."""
    try:
        return str(summary(driver.algorithm, driver.specs, dist.get_world_size(driver.process_group)))
    except Exception:
        return repr(driver.algorithm)


def reconfigured(
    driver: Driver, algorithm: Algorithm, settings: Mapping[str, str], *, in_buckets: bool = True, **options: Any
) -> tuple[Driver, StateMismatch]:
    """A driver of another algorithm that goes on where this one stands, of which nothing is changed. To be called on all ranks.

    Args:
        driver: on this rank.
        algorithm: what to run.
        settings: what else has to be equal on all ranks.
        in_buckets: gradients come bucket by bucket, and not all at once.
        **options: of `Driver`, in place of this one's.

    Returns:
        The new driver, and what of the memory does not fit it.

    Raises:
        TypeError: no algorithm.
        ValueError: on all ranks, if it cannot be served or they differ.
    """
    require_gradient_algorithm(algorithm)
    groups: list[Groups] = []
    obstacle = algorithm_obstacle(algorithm, in_buckets=in_buckets)
    if not obstacle:
        groups, obstacle = tried(algorithm, driver.specs, dist.get_world_size(driver.process_group))
    settings = {"algorithm": repr(algorithm), "step": str(driver.steps), **settings, "groups": str(groups)}
    require_same_on_all_ranks(driver.process_group, settings, {}, obstacle, driver.ops.device)
    kept: dict[str, Any] = {"message_bytes": driver.message_bytes, "grad_scaler": driver.scale.scaler}
    new = Driver(algorithm, driver.specs, driver.ops.device, driver.groups.also(groups), **kept | options)
    difference = new.continue_from(driver)
    announce(new)
    return new, difference
