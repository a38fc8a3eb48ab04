"""Any optimizer of torch as the outer one of local SGD, made by a factory.

A new optimizer is made for each outer step, given what the last one remembered, and asked for the
same again: so what it remembers is in the memory of local SGD, by parameter and by name, and is
saved, loaded and left alone like the rest of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.local_sgd.outer import OUTERS, OuterFactory
from gradwire.core.ops import A, Ops, Spec
from gradwire.torch_backend.ops.workspace import dtype_name

#: 0 until the first step that was taken: what an optimizer begins with is its own business.
BEGUN = f"{OUTERS}begun"


@dataclass(frozen=True)
class _Remembered:
    """One thing that an optimizer remembers of a parameter. `kind` is a Tensor's or a number's;
    tensors `on_host` stay there beside any parameter."""

    spec: Spec
    kind: type
    on_host: bool


class TorchOuter(OuterFactory):
    """An optimizer of torch.

    Args:
        factory: what makes it.
        specs: of the outer parameters that there are.
        device: of them.

    Raises:
        ValueError: `factory` does not make an optimizer of torch; it cannot be made of these
            parameters, or steps by a closure; or it remembers what is no tensor and no number, or
            something of all parameters together.
    """

    def __init__(
        self, factory: OuterFactory, specs: Mapping[str, Spec], device: torch.device
    ) -> None:
        super().__init__(factory.make)
        self._device = device
        self._remembered: dict[Spec, dict[str, _Remembered]] = {}
        made = self._made([torch.empty(2, 2, dtype=torch.float32, device="meta")])
        given = [
            f"{key}={value!r}"
            for key, value in made.defaults.items()
            if value is not None and value is not False
        ]
        self._name = f"{type(made).__module__}.{type(made).__qualname__}({', '.join(given)})"
        for spec in specs.values():
            self._of(spec)

    @property
    def name(self) -> str:
        return self._name

    @property
    def memories(self) -> frozenset[str]:
        return frozenset({BEGUN, *(OUTERS + key for of in self._remembered.values() for key in of)})

    def init(self, ops: Ops[A], outer: Mapping[str, A]) -> dict[str, dict[str, A]]:
        return {
            name: (
                {BEGUN: ops.zeros((), "float32")}
                | {
                    OUTERS + key: ops.zeros(found.spec.shape, found.spec.dtype)
                    for key, found in self._of(Spec(tuple(x.shape), ops.dtype_of(x))).items()
                }
            )
            for name, x in outer.items()
        }

    def step(
        self,
        ops: Ops[A],
        outer: Mapping[str, A],
        averages: Mapping[str, A],
        memory: Mapping[str, Mapping[str, A]],
    ) -> tuple[dict[str, A], dict[str, dict[str, A]]]:
        """An outer step. The host waits for an accelerator, if parameters are there: optimizers
        count their steps on the host."""
        parameters: Any = {name: torch.nn.Parameter(x.clone()) for name, x in outer.items()}  # type: ignore[attr-defined]
        optimizer = self._made(list(parameters.values()))
        for name, p in parameters.items():
            p.grad = averages[name]
            if memory[name][BEGUN]:
                optimizer.state[p] = self._given_back(p, memory[name])
        optimizer.step()
        after: dict[str, Any] = {}
        for name, p in parameters.items():
            found = optimizer.state[p]
            after[name] = {
                **memory[name],
                BEGUN: torch.ones((), dtype=torch.float32, device=p.device),
            }
            for key, kept in self._of(Spec(tuple(p.shape), dtype_name(p.dtype))).items():
                dtype = getattr(torch, kept.spec.dtype)
                after[name][OUTERS + key] = torch.as_tensor(
                    found[key], dtype=dtype, device=p.device
                )
        return {name: p.detach() for name, p in parameters.items()}, after

    def _given_back(self, p: Tensor, memory: Mapping[str, Any]) -> dict[str, Any]:
        """What the optimizer remembered of a parameter, as it had it; it may write over it."""
        state: dict[str, Any] = {}
        for key, kept in self._of(Spec(tuple(p.shape), dtype_name(p.dtype))).items():
            x = memory[OUTERS + key]
            state[key] = (
                x.to("cpu" if kept.on_host else p.device, copy=True)
                if kept.kind is Tensor
                else kept.kind(x.item())
            )
        return state

    def _made(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        try:
            made = self.make(parameters)
        except Exception as error:
            raise ValueError(
                f"outer={super().name} is called with the outer parameters, and fails: {error}"
            ) from error
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(  # noqa: TRY004  (all ranks are told so)
                f"outer={super().name} makes a {type(made).__name__}; in torch give what makes a"
                " torch.optim.Optimizer of parameters, or OuterSGD(…)"
            )
        return made

    def _of(self, spec: Spec) -> dict[str, _Remembered]:
        """What it remembers of such a parameter: two steps are taken, without data if the optimizer
        never asks for any."""
        if spec not in self._remembered:
            try:
                self._remembered[spec] = self._tried(spec, torch.device("meta"))
            except Exception:
                self._remembered[spec] = self._tried(spec, self._device)
        return self._remembered[spec]

    def _tried(self, spec: Spec, device: torch.device) -> dict[str, _Remembered]:
        p = torch.nn.Parameter(
            torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        )
        optimizer = self._made([p])
        before = _of_groups(optimizer)
        try:
            for _ in range(2):
                p.grad = torch.zeros_like(p)
                optimizer.step()
        except Exception as error:
            raise ValueError(
                f"outer={self._name}: its step fails for a parameter of shape {spec.shape}: {error}"
            ) from error
        if before != _of_groups(optimizer):
            raise ValueError(
                f"outer={self._name} remembers something of all parameters together, and memories"
                " are of each; give another optimizer"
            )
        found = {}
        for key, x in optimizer.state[p].items():
            if isinstance(x, Tensor):
                found[key] = _Remembered(
                    Spec(tuple(x.shape), dtype_name(x.dtype)), Tensor, x.device != device
                )
            elif type(x) in (bool, int, float):
                found[key] = _Remembered(Spec((), "float64"), type(x), True)
            elif x is not None:
                raise ValueError(
                    f"outer={self._name} remembers {key!r}, a {type(x).__name__}; tensors and"
                    " numbers can be saved"
                )
        return found


def _of_groups(optimizer: torch.optim.Optimizer) -> list[str]:
    return [
        repr({key: x for key, x in group.items() if key != "params"})
        for group in optimizer.param_groups
    ]


def in_torch(local: LocalSGD, specs: Mapping[str, Spec], device: torch.device) -> LocalSGD:
    """The schedule with its outer optimizer, if that is of torch. Raises ValueError as
    `TorchOuter`."""
    if not isinstance(local.outer, OuterFactory):
        return local
    return replace(local, outer=TorchOuter(local.outer, local.kept(specs), device))
