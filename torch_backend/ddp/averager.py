"""An algorithm without DDP: it averages gradients that somebody else has made, between backward and
step.

    method = WireDtype(PowerSGD(16), "int8")
    averager = gradwire.torch_backend.Averager(method, dict(model.named_parameters()))
    ...
    loss.backward()
    averager({name: p.grad for name, p in model.named_parameters()})
    optimizer.step()

For FSDP2's replicas, for hand-written loops, for engines that take no hook (docs/averager.md).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.algorithm import Algorithm
from gradwire.core.text.options import checked
from gradwire.core.text.wording import some
from gradwire.torch_backend.engine.driver import Driver, specs_of
from gradwire.torch_backend.engine.groups.nodes import on_nodes
from gradwire.torch_backend.engine.groups.process_groups import given_or_default
from gradwire.torch_backend.engine.torch_modes import outside_inference_mode, uncompiled
from gradwire.torch_backend.ops.workspace import dtype_name
from gradwire.torch_backend.setup.consistency import algorithm_obstacle, require_initialized
from gradwire.torch_backend.setup.handle import Handle
from gradwire.torch_backend.setup.registration import announce, prepared, require_gradient_algorithm
from gradwire.torch_backend.setup.sharded_models import is_dtensor, sharded_parameter


class Averager(Handle):
    """Averages gradients over the ranks of a group, in place, by any algorithm. All of a step are
    given at once: nothing overlaps with the backward pass, and a step of `PowerSGD` is two
    messages.

    To be made on all ranks of the group, with the same tensors in the same order. It communicates
    once, to check that, and then in each call.

    Examples:
        >>> import gradwire, torch
        >>> from gradwire.torch_backend import Averager
        >>> model = torch.nn.Linear(512, 512)
        >>> method = gradwire.WireDtype(gradwire.PowerSGD(16), "int8")
        >>> averager = Averager(method, dict(model.named_parameters()))
        >>> model(torch.ones(2, 512)).sum().backward()
        >>> gradients = {name: p.grad for name, p in model.named_parameters()}
        >>> averages = averager(gradients)    # the same tensors
        >>> averager.stats().collectives
        4

    Args:
        algorithm: what to run, the same on every rank.
        tensors: name → parameter, or anything of its shape, dtype and device: gradients will come
            under these names. Memory belongs to the names. Of a DTensor give the local part,
            `p.to_local()`, and the group of the ranks that hold the same part. Not kept.
        group: whose ranks are averaged over; None is the default group.
        unused: gradients may be None, where a parameter took no part in this rank's forward pass.
            They count as zeros. Costs a small message in each step, for which the host waits.
        grad_scaler: the scaler of the loss; see `register_comm_hook`.

    Warns:
        CompressionWarning: see `register_comm_hook`.

    Raises:
        TypeError: `algorithm` is no algorithm, or something in `tensors` is no tensor.
        ValueError: something cannot be served (named), or ranks ask for different things; on all
            ranks.
    """

    in_buckets = False

    @outside_inference_mode
    @checked
    def __init__(
        self,
        algorithm: Algorithm,
        tensors: Mapping[str, Tensor],
        group: dist.ProcessGroup | None = None,
        *,
        unused: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        require_gradient_algorithm(algorithm)
        require_initialized(tensors)
        group = given_or_default(group, "group")
        algorithm = on_nodes(algorithm, group, next((x.device for x in tensors.values()), None))
        settings = {"unused": str(unused), "grad_scaler": str(grad_scaler is not None)}
        groups, trial = prepared(algorithm, tensors, group, settings, _obstacle(algorithm, tensors))
        device = next(iter(tensors.values())).device
        driver = Driver(algorithm, specs_of(tensors), device, groups, grad_scaler=grad_scaler)
        announce(driver, trial)
        super().__init__(driver)
        self._unused = unused
        self._specs = driver.specs

    @uncompiled
    def __call__(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Average the gradients of a step. To be called on all ranks.

        Args:
            gradients: name → this rank's gradient, of every tensor; overwritten with the average.
                None, with `unused=True`, if there is none.

        Returns:
            The averages by name: the same tensors, and new ones in place of None. With
                `unused=True`, only of what some rank has used.

        Raises:
            TypeError: a gradient is a DTensor.
            ValueError: names are missing or unknown, or a gradient has another shape or dtype, is
                sparse, is given under two names, or has elements that share memory, or is None
                without `unused`. Nothing has been sent then, and the other ranks wait.
        """
        self._check(gradients)
        absent = {name for name in self._specs if gradients[name] is None}
        usage = (
            self._driver.send_usage([name not in absent for name in self._specs])
            if self._unused
            else None
        )
        everything = {
            name: self._zeros(name) if (g := gradients[name]) is None else g for name in self._specs
        }
        self._driver.add(everything, first=True, last=True, unused=absent if self._unused else None)
        if usage is None:
            return everything
        usage.receive()
        by_somebody = dict(zip(everything, usage.result.tolist(), strict=True))
        return {name: average for name, average in everything.items() if by_somebody[name]}

    def _zeros(self, name: str) -> Tensor:
        spec = self._specs[name]
        return self._driver.ops.zeros(tuple(spec.shape), spec.dtype)

    def _check(self, gradients: Mapping[str, Tensor | None]) -> None:
        if gradients.keys() != self._specs.keys():
            lacking = [name for name in self._specs if name not in gradients]
            unknown = [name for name in gradients if name not in self._specs]
            raise ValueError(
                f"gradients must have the names of tensors: {some(lacking)} missing,"
                f" {some(unknown)} unknown. A parameter without a gradient is there as None, with"
                " unused=True"
            )
        names: dict[int, str] = {}
        for name, g in gradients.items():
            if g is None:
                if not self._unused:
                    raise ValueError(
                        f"gradients[{name!r}] is None. If a forward pass may leave parameters out,"
                        " say so: Averager(..., unused=True)"
                    )
                continue
            if is_dtensor(g):
                raise TypeError(
                    f"gradients[{name!r}] is a DTensor; give its local part, p.grad.to_local()"
                )
            if (other := names.setdefault(id(g), name)) != name:
                raise ValueError(
                    f"gradients[{name!r}] and gradients[{other!r}] are one tensor, which cannot"
                    " hold two averages; give it under one name"
                )
            if g.requires_grad:
                raise ValueError(
                    f"gradients[{name!r}] has a graph of its own, made by create_graph=True, and"
                    " averages are written in its place; the inner derivatives are this replica's"
                )
            spec = self._specs[name]
            if g.is_sparse:
                raise ValueError(
                    f"gradients[{name!r}] is sparse; build the embedding with sparse=False"
                )
            if 0 in g.stride() and any(
                n > 1 and step == 0 for n, step in zip(g.shape, g.stride(), strict=True)
            ):
                raise ValueError(
                    f"gradients[{name!r}] is expanded: its elements share memory, which cannot hold"
                    " their averages; clone it"
                )
            if g.shape != spec.shape or dtype_name(g.dtype) != spec.dtype:
                raise ValueError(
                    f"gradients[{name!r}] is {tuple(g.shape)} {dtype_name(g.dtype)}; the tensor was"
                    f" {tuple(spec.shape)} {spec.dtype}"
                )


def _obstacle(algorithm: Algorithm, tensors: Mapping[str, Tensor]) -> str:
    """Why this rank cannot take part; "" if it can."""
    if not tensors:
        return "tensors={} has nothing to average"
    if name := sharded_parameter(tensors):
        return (
            f"tensors[{name!r}] is a DTensor; give its local part, p.to_local(), and the group of"
            " the ranks that hold the same part"
        )
    devices = {x.device for x in tensors.values()}
    if len(devices) > 1:
        return f"tensors are on {sorted(map(str, devices))}; make an Averager for each device"
    return algorithm_obstacle(algorithm, in_buckets=False)
