"""Muon on a model that `fully_shard` has sharded: each matrix is gathered to one rank,
orthogonalized there, and scattered back.

    momentum, on the blocks  →  all-to-all  →  Newton-Schulz, on the whole matrix
                                                          →  all-to-all  →  weights, on the blocks

Every shard of a replica owns one matrix of a round. The matrices of the next round travel while
those of this one are orthogonalized (DMuon, arXiv 2606.27153). Under HSDP replicas own different
matrices, and broadcast the results. Momentum and weights are elementwise, so the state is sharded
as the parameters are: tools for sharded models save it as that of any other optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gradwire.core.ops import Spec
from gradwire.core.zero.sharding import shard_by_parameter
from gradwire.torch_backend.fsdp.layout import local_part
from gradwire.torch_backend.monitor.stats import Stats
from gradwire.torch_backend.setup.sharded_models import is_dtensor
from gradwire.torch_backend.torch_internals import step_unseen
from gradwire.torch_backend.zero.arguments import agreed_on, are_made_up
from gradwire.torch_backend.zero.rules import Mixture, Rule
from gradwire.torch_backend.zero.state import MASTER, difference_of


@dataclass(frozen=True)
class Place:
    """The place of this rank in the mesh of a sharded model.

    Attributes:
        mesh: the ranks, replicas × shards.
        replica, shard: of this rank.
        shards: the group of this replica.
        replicas: the group of the ranks with this rank's blocks; None where there is one replica.
    """

    mesh: Tensor
    replica: int
    shard: int
    shards: dist.ProcessGroup
    replicas: dist.ProcessGroup | None

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor]) -> Place:
        """The place that these say. Raises ValueError for the first that is not sharded by rows
        alone over the mesh of all, naming it."""
        first: DeviceMesh | None = None
        for name, p in parameters.items():
            mesh, placements = getattr(p, "device_mesh", None), tuple(getattr(p, "placements", ()))
            if mesh is None:
                raise ValueError(
                    f"parameter {name!r} is no DTensor and others are: call fully_shard on the"
                    " whole model"
                )
            first = first or mesh
            rows = (
                placements
                and type(placements[-1]).__name__ == "Shard"
                and placements[-1].is_shard(0)
            )
            if (
                mesh != first
                or len(placements) > 2
                or not rows
                or not all(x.is_replicate() for x in placements[:-1])
            ):
                raise ValueError(
                    f"parameter {name!r} is {placements} on {mesh}; ZeroOptimizer takes DTensors"
                    " that fully_shard has divided by rows over one mesh, (shard) or (replicate,"
                    " shard). With tensor parallelism use torch's optimizers"
                )
            if local_part(p).device.type != mesh.device_type:
                raise ValueError(
                    f"parameter {name!r} is offloaded to the CPU; leave offload_policy out of"
                    " fully_shard"
                )
        assert first is not None
        ranks, here = first.mesh.reshape(-1, first.mesh.shape[-1]), first.get_coordinate()
        assert here is not None
        place = cls(
            ranks,
            here[0] if first.ndim > 1 else 0,
            here[-1],
            first.get_group(first.ndim - 1),
            first.get_group(0) if len(ranks) > 1 else None,
        )
        if dist.get_process_group_ranks(place.shards) != ranks[place.replica].tolist():
            raise ValueError(
                f"the ranks of the mesh {first} are not in order; make it by init_device_mesh"
            )
        return place

    def blocks(self, shape: Sequence[int]) -> list[int]:
        """How many elements of a matrix each shard has, as `torch.chunk` gives them."""
        n, m = shape
        shards = self.mesh.shape[1]
        each = -(-n // shards)
        return [max(min((s + 1) * each, n) - s * each, 0) * m for s in range(shards)]


class OwnedMuon(torch.optim.Optimizer):
    """`torch.optim.Muon` on parameters that are sharded, once it has been told who owns
    which (`take_over`).

    Args:
        rule: of the parameters.
        group: these.
        names: theirs.
        place: where this rank is.
    """

    def __init__(
        self, rule: Rule, group: dict[str, Any], names: Mapping[Tensor, str], place: Place
    ) -> None:
        self._class, self._place = rule.optimizer_class, place
        plain = rule.optimizer([dict(group)])  # which checks options and shapes
        super().__init__(plain.param_groups, plain.defaults)
        self._options = tuple(plain.defaults)  # torch puts more into them later
        matrices = [p for own in self.param_groups for p in own["params"]]
        if len(dtypes := {p.dtype for p in matrices}) > 1:
            raise ValueError(
                f"{rule.subject}: matrices are of {sorted(map(str, dtypes))}; give each dtype a"
                " pattern"
            )
        self.specs = {
            names[p]: Spec(tuple(p.shape), str(p.dtype).removeprefix("torch.")) for p in matrices
        }
        self.work = {name: rule.work(spec) for name, spec in self.specs.items()}
        self._names = names
        #: Of each rank, by its place in the mesh, what it owns, the most work first.
        self._owned: list[list[Tensor]] = []
        self.messages = self.bytes_sent = 0

    def take_over(self, owners: Mapping[str, int]) -> None:
        """Let matrices be orthogonalized by these ranks, name → place in the mesh."""
        matrices = sorted(
            (p for group in self.param_groups for p in group["params"]),
            key=lambda p: -self.work[self._names[p]],
        )
        self._owned = [
            [p for p in matrices if owners[self._names[p]] == r]
            for r in range(self._place.mesh.numel())
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update parameters that have a gradient, on all ranks."""
        del closure
        group_of = {
            p: group for group in self.param_groups for p in group["params"] if p.grad is not None
        }
        rounds = self._rounds(set(group_of))
        momenta = {p: self._momentum(p, group) for p, group in group_of.items()}
        returning = []
        arriving = self._gathered(rounds[0], momenta) if rounds else None
        for i, own in enumerate(rounds):
            coming = self._gathered(rounds[i + 1], momenta) if i + 1 < len(rounds) else None
            assert arriving is not None
            mine, whole = own[self._place.replica][self._place.shard], arriving()
            returning.append(
                self._scattered(
                    own, whole if mine is None else self._orthogonal(whole, mine, group_of[mine])
                )
            )
            arriving = coming
        for own, returned in zip(rounds, returning, strict=True):
            for p, change in self._of_all_replicas(own, returned()).items():
                group = group_of[p]
                local_part(p).mul_(1 - float(group["lr"]) * group["weight_decay"]).add_(change)

    def _rounds(self, present: set[Tensor]) -> list[list[list[Tensor | None]]]:
        """Round → replica → shard → the matrix that it owns."""
        shards = self._place.mesh.shape[1]
        owned = [[p for p in own if p in present] for own in self._owned]
        rounds = [
            [own[i] if i < len(own) else None for own in owned] for i in range(max(map(len, owned)))
        ]
        return [[own[i : i + shards] for i in range(0, len(own), shards)] for own in rounds]

    def _momentum(self, p: Tensor, group: Mapping[str, Any]) -> Tensor:
        """What is orthogonalized, of this rank's block."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)  # type: ignore[arg-type]
        assert p.grad is not None
        gradient, momentum = local_part(p.grad), local_part(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def _gathered(
        self, own: list[list[Tensor | None]], momenta: Mapping[Tensor, Tensor]
    ) -> Callable[[], Tensor]:
        """The matrix that this rank owns in a round, flat, when it has come."""
        place = self._place
        here = own[place.replica]
        like = next(iter(momenta.values()))
        blocks = [like.new_empty(0) if p is None else momenta[p].reshape(-1) for p in here]
        mine = here[place.shard]
        counts = [0] * len(here) if mine is None else place.blocks(mine.shape)
        return self._exchanged(torch.cat(blocks), counts, [x.numel() for x in blocks], here)

    def _scattered(self, own: list[list[Tensor | None]], whole: Tensor) -> Callable[[], Tensor]:
        """This rank's blocks of what the shards of its replica own in a round, when they have
        come."""
        place = self._place
        here = own[place.replica]
        mine = here[place.shard]
        counts = [0] * len(here) if mine is None else place.blocks(mine.shape)
        return self._exchanged(whole, [self._block(p) for p in here], counts, here)

    def _block(self, p: Tensor | None) -> int:
        return 0 if p is None else self._place.blocks(p.shape)[self._place.shard]

    def _exchanged(
        self, sent: Tensor, received: list[int], counts: list[int], here: Sequence[Tensor | None]
    ) -> Callable[[], Tensor]:
        into = sent.new_empty(sum(received))
        if all(p is None for p in here):
            return lambda: into
        self.messages += 1
        self.bytes_sent += sum(p.numel() for p in here if p is not None) * sent.element_size() // 2
        work = dist.all_to_all_single(
            into, sent, received, counts, group=self._place.shards, async_op=True
        )

        def arrived() -> Tensor:
            work.wait()
            return into

        return arrived

    def _orthogonal(self, momentum: Tensor, p: Tensor, group: Mapping[str, Any]) -> Tensor:
        """The change of a matrix without weight decay: that of zeros, by torch's own Muon."""
        stand_in = torch.nn.Parameter(momentum.new_zeros(p.shape))
        stand_in.grad = momentum.view(p.shape)
        options, valid = ({key: x[key] for key in self._options} for x in (group, self.defaults))
        muon = self._class([stand_in], **valid)
        # which nobody checks any more: a schedule may end below zero
        muon.param_groups[0].update(options | {"momentum": 0.0, "nesterov": False})
        step_unseen(muon)
        return stand_in.detach().reshape(-1)

    def _of_all_replicas(
        self, own: list[list[Tensor | None]], returned: Tensor
    ) -> dict[Tensor, Tensor]:
        """This rank's block of the change of each matrix of a round."""
        place, changes, sending = self._place, {}, []
        for replica, here in enumerate(own):
            counts = [self._block(p) for p in here]
            blocks = returned if replica == place.replica else returned.new_empty(sum(counts))
            if place.replicas is not None and blocks.numel():
                source = int(place.mesh[replica, place.shard])
                sending.append(dist.broadcast(blocks, source, group=place.replicas, async_op=True))
                self.messages += 1
                self.bytes_sent += blocks.nbytes
            for p, block in zip(here, torch.split(blocks, counts), strict=True):
                if p is not None:
                    changes[p] = block.view(local_part(p).shape)
        for work in sending:
            work.wait()
        return changes


class OnShards(Mixture):
    """The optimizers of the parameter groups of a sharded model, on its DTensors.

    Args:
        rules: of each group.
        groups: of parameters.
        names: theirs.
        settings: which all ranks must have alike.
        refused: what an optimizer has against its arguments.

    Raises:
        ValueError: parameters that are divided in another way, or ranks that ask for different
            things.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        groups: Sequence[dict[str, Any]],
        names: Mapping[Tensor, str],
        settings: Mapping[str, Any],
        refused: Exception | None,
    ) -> None:
        trained = {name: p for p, name in names.items()}
        place = Place.of(trained)

        def parts() -> list[torch.optim.Optimizer]:
            named = [
                {**group, "params": [(names[p], p) for p in group["params"]]} for group in groups
            ]
            made = [
                (
                    OwnedMuon(rule, group, names, place)
                    if rule.shard == "parameter"
                    else rule.optimizer([group])
                )
                for rule, group in zip(rules, named, strict=True)
            ]
            muons = [part for part in made if isinstance(part, OwnedMuon)]
            specs = {name: spec for part in muons for name, spec in part.specs.items()}
            work = {name: number for part in muons for name, number in part.work.items()}
            owners = shard_by_parameter(specs, place.mesh.numel(), work).owners if muons else {}
            for part in muons:
                part.take_over(owners)
            return made

        def agreed() -> list[torch.optim.Optimizer]:
            return agreed_on(place.shards, settings, trained, parts, refused)

        found = (
            agreed()
            if place.replicas is None
            else agreed_on(place.replicas, settings, trained, agreed, None)
        )
        super().__init__(found)
        self._rules = list(rules)
        self._names = names
        self._steps = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One of each."""
        result = super().step(closure)
        self._steps += 1
        return result

    def stats(self) -> Stats:
        """Steps, and what they have sent: a round's matrices count half for each way."""
        muons = [part for part in self.parts if isinstance(part, OwnedMuon)]
        messages, sent = (
            sum(part.messages for part in muons),
            sum(part.bytes_sent for part in muons),
        )
        return Stats(
            self._steps, 0, messages, sent, self._steps * sum(p.nbytes for p in self._names)
        )

    def whole(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A state with whole tensors. All ranks call it."""

        def full(x: Any) -> Any:
            return x.full_tensor() if is_dtensor(x) else x

        state = {
            number: {key: full(x) for key, x in own.items()}
            for number, own in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of these parameters, by name if it has names; or of whole ones, in which
        case all ranks call it. Raises ValueError for what does not fit; nothing is changed then."""
        from torch.distributed.tensor import distribute_tensor

        theirs, ours = (
            [len(group["params"]) for group in groups]
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        if theirs != ours:
            raise ValueError(
                f"the state has parameter groups of {theirs} parameters, this optimizer of {ours}"
            )
        state_dict = {**state_dict, "param_groups": self._in_order(state_dict["param_groups"])}
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        of_number: dict[Any, Any] = dict(zip(numbers, parameters, strict=True))

        def placed(number: Any, key: str, x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.ndim:
                return x
            p = of_number[number]
            what = f"{key!r} of parameter {self._names[p]!r}"
            if x.shape != p.shape:
                raise ValueError(
                    f"{what} has shape {tuple(x.shape)} in the state, and the parameter"
                    f" {tuple(p.shape)}"
                )
            if is_dtensor(x):
                return x
            if not x.isfinite().all():
                raise ValueError(f"{what} holds NaN or inf in the state")
            return distribute_tensor(x, p.device_mesh, p.placements)

        if unknown := [number for number in state_dict["state"] if number not in of_number]:
            raise ValueError(f"the state holds that of parameter {unknown[0]!r}, of no group")
        # Weights are the model's: full precision of an optimizer without shards of its own is none.
        state = {
            number: {key: placed(number, key, x) for key, x in own.items() if key != MASTER}
            for number, own in state_dict["state"].items()
        }
        for rule, group in zip(self._rules, state_dict["param_groups"], strict=True):
            # the first of each kind: what is tried out is no larger than that
            kinds = {
                (of_number[number].ndim, of_number[number].dtype, *sorted(state[number])): number
                for number in reversed(group["params"])
                if state.get(number)
            }
            for number in kinds.values():
                self._require_served(rule, of_number[number], group, state[number])
        super().load_state_dict({**state_dict, "state": state})

    def _require_served(
        self, rule: Rule, p: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> None:
        """Raise ValueError for a state from which the optimizer cannot step a parameter: it is
        tried out with a few zeros."""
        few = torch.zeros((2,) * p.ndim, dtype=p.dtype, device=local_part(p).device)
        stand_in = torch.nn.Parameter(few)
        stand_in.grad = torch.zeros_like(few)
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        of_few = {
            key: torch.zeros_like(few, dtype=x.dtype) if isinstance(x, Tensor) and x.ndim else x
            for key, x in state.items()
        }
        loaded = {"state": {0: of_few}, "param_groups": [{**options, "params": [0]}]}
        try:
            trial = rule.optimizer([{"params": [stand_in]}])
            trial.load_state_dict(copy.deepcopy(loaded))
            step_unseen(trial)
        except Exception as error:  # of any optimizer, from anything
            raise ValueError(
                f"{rule.optimizer_class.__name__} cannot step with the state of parameter"
                f" {self._names[p]!r}, which holds {sorted(state)} and options"
                f" {sorted(options)}: {type(error).__name__}: {error}"
            ) from error

    def _in_order(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Groups of a state with their parameters in the order of those here, where both have the
        same names; where one has none they are taken as they come, as torch does. Raises ValueError
        for other names."""
        ordered = []
        for theirs, ours in zip(groups, self.param_groups, strict=True):
            own = [self._names[p] for p in ours["params"]]
            named = dict(zip(theirs.get("param_names") or (), theirs["params"], strict=False))
            if named.keys() == set(own):
                theirs = {**theirs, "params": [named[n] for n in own]}
            elif named and not are_made_up(named) and not are_made_up(own):
                raise ValueError(
                    f"the state is of other parameters: {difference_of([[*named]], [own])}"
                )
            ordered.append({**theirs, "param_names": own})
        return ordered
