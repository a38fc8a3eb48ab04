"""What every entry point does before the first step: a dry run of the algorithm, compare with all
ranks, make process groups, say what will be done."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.algorithm import Algorithm, require_algorithm
from gradwire.core.algorithms.two_level import levels_of
from gradwire.core.kernels.abstract import NotPortable
from gradwire.core.local_sgd.schedule import Schedule
from gradwire.core.ops import Spec
from gradwire.core.plan.advice import advice_on_nodes, warn
from gradwire.core.plan.dry_run import Summary, dry_run, summary
from gradwire.core.plan.links import Library, links_of
from gradwire.core.protocol.groups import Groups
from gradwire.core.protocol.programs import UnknownRequest
from gradwire.core.protocol.settings import settings_of
from gradwire.core.state.checkpoint import StateMismatch
from gradwire.core.text.name_patterns import UnmatchedPattern, matches
from gradwire.core.text.wording import some
from gradwire.torch_backend.engine.collectives import answerable
from gradwire.torch_backend.engine.driver import Driver, specs_of
from gradwire.torch_backend.engine.groups.nodes import on_nodes
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.engine.torch_modes import outside_inference_mode
from gradwire.torch_backend.setup.consistency import (
    algorithm_obstacle,
    describe,
    meet_to_change,
    require_same_on_all_ranks,
)
from gradwire.torch_backend.setup.self_check import wrong_here

logger = logging.getLogger("gradwire")


def require_gradient_algorithm(algorithm: object) -> None:
    """Raise TypeError for what is no algorithm. A schedule is one for `local_sgd`, which
    `rank_checks.obstacle` says."""
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
) -> tuple[ProcessGroups, Trial]:
    """Try the algorithm out, compare with all ranks, and make the groups that it averages in.

    Args:
        algorithm, parameters: what averages, and what is averaged.
        group: of all replicas.
        settings: what else has to be equal on all ranks.
        obstacle: why this rank cannot take part; "" if it can.
        described: what is compared of tensors. None: the parameters.
        frozen: names of parameters that are not averaged.

    Raises:
        ValueError: on all ranks, if one cannot take part or they differ.
    """
    trial = Trial(obstacle=obstacle)
    device = next((p.device for p in parameters.values()), None)
    if not obstacle:
        trial = tried(algorithm, specs_of(parameters), dist.get_world_size(group), device, frozen)
    settings = {"algorithm": repr(algorithm), **settings, "groups": str(list(trial.groups))}
    described = describe(parameters) if described is None else described
    require_same_on_all_ranks(group, settings, described, trial.obstacle, device)
    return ProcessGroups(group, trial.groups), trial


@dataclass(frozen=True)
class Trial:
    """What came of running the steps of an algorithm without data: an obstacle, "" if there is
    none; the groups that it averages in; and what it does, None where nobody has tried."""

    obstacle: str = ""
    groups: Sequence[Groups] = ()
    summary: Summary | None = None


def tried(
    algorithm: Algorithm,
    specs: Mapping[str, Spec],
    replicas: int,
    device: torch.device | None,
    frozen: Collection[str] = (),
) -> Trial:
    """Run the steps of an algorithm without data, once; then on known data, where the device is an
    accelerator: see `gradwire.torch_backend.setup.self_check`."""
    trial = _dry(algorithm, specs, replicas, frozen)
    if trial.obstacle or trial.summary is None:
        return trial
    return replace(trial, obstacle=wrong_here(algorithm, specs, replicas, device))


def _dry(
    algorithm: Algorithm, specs: Mapping[str, Spec], replicas: int, frozen: Collection[str]
) -> Trial:
    try:
        dry = dry_run(algorithm, specs, replicas)
        for request in dry.requests:
            if not answerable(request, optimizer=False):
                return Trial(
                    f"{algorithm!r} asks for {type(request).__name__}, which nobody answers while"
                    " gradients are averaged; gradwire.torch_backend.ZeroOptimizer has the driver"
                    " of sharded optimizers"
                )
        settings_of(dry.requests)
        levels, groups = levels_of(algorithm), list(dry.groups)
        if (
            levels is not None and levels.inter_node(replicas) not in groups
        ):  # one node sends nothing, and its state is that of a node all the same
            groups.append(levels.inter_node(replicas))
        return Trial("", groups, summary(algorithm, specs, replicas))
    except UnmatchedPattern as error:
        fits = [name for name in frozen if matches(name, error.pattern)]
        if not fits:
            return Trial(str(error))
        return Trial(
            f"{error.option} pattern {error.pattern!r} fits frozen parameters only,"
            f" {some(fits, 1)}, which have no gradient to average; leave it out"
        )
    except (ValueError, UnknownRequest, NotPortable) as error:
        return Trial(str(error))
    except Exception as error:  # of the algorithm itself: on data it would come in the first step
        return Trial(f"{algorithm!r} cannot be run without data: {type(error).__name__}: {error}")


def announce(driver: Driver, trial: Trial) -> None:
    """Warn of what stays uncompressed, and log in one line what is done, on the first rank."""
    warn(driver.algorithm, driver.specs)
    if logger.isEnabledFor(logging.INFO) and dist.get_rank(driver.process_group) == 0:
        logger.info("%s", trial.summary or repr(driver.algorithm))
        if trial.summary is not None and (hint := _on_nodes(driver)):
            logger.info("%s", hint)


def _on_nodes(driver: Driver) -> str:
    """Whether two levels would send less between the nodes that torchrun has told of."""
    local, ranks = os.environ.get("LOCAL_WORLD_SIZE", ""), dist.get_world_size(driver.process_group)
    if (
        not local.isdigit()
        or not int(local)
        or ranks != dist.get_world_size()
        or ranks % int(local)
    ):
        return ""
    library: Library = "gloo" if driver.ops.device.type == "cpu" else "nccl"
    return advice_on_nodes(
        driver.algorithm, driver.specs, links_of(None, ranks, ranks // int(local), library)
    )


def in_one_line(driver: Driver) -> str:
    """What it does; the `repr` alone of an algorithm that cannot be tried without data."""
    try:
        return str(
            summary(driver.algorithm, driver.specs, dist.get_world_size(driver.process_group))
        )
    except Exception:
        return repr(driver.algorithm)


@outside_inference_mode
def reconfigured(
    driver: Driver,
    algorithm: Algorithm,
    settings: Mapping[str, str],
    *,
    in_buckets: bool = True,
    **options: Any,
) -> tuple[Driver, StateMismatch]:
    """A driver of another algorithm that goes on from the step and the memory of this one, of which
    nothing is changed; and what of the memory does not fit it. To be called on all ranks.
    `settings` have to be equal on them besides, and `options` of `Driver` are given in place of
    this one's.

    Raises:
        TypeError: no algorithm.
        ValueError: on all ranks, if it cannot be served or they differ.
        RuntimeError: some ranks have not called it within 10 minutes, or the timeout that the
            process group was given.
    """
    require_gradient_algorithm(algorithm)
    meet_to_change(driver.memory.placement.meetings)
    algorithm = on_nodes(algorithm, driver.process_group, driver.ops.device)
    trial = Trial(algorithm_obstacle(algorithm, in_buckets=in_buckets))
    if not trial.obstacle:
        trial = tried(
            algorithm, driver.specs, dist.get_world_size(driver.process_group), driver.ops.device
        )
    settings = {
        "algorithm": repr(algorithm),
        "step": str(driver.memory.steps),
        **settings,
        "groups": str(list(trial.groups)),
    }
    require_same_on_all_ranks(driver.process_group, settings, {}, trial.obstacle, driver.ops.device)
    kept: dict[str, Any] = {
        "message_bytes": driver.message_bytes,
        "grad_scaler": driver.memory.scale.scaler,
    }
    new = driver.successor(algorithm, driver.groups.also(trial.groups), **kept | options)
    difference = new.continue_from(driver)
    new.discarding = driver.discarding
    announce(new, trial)
    return new, difference
