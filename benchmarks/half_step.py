"""What a half-step costs in accuracy: PowerSGD's full and half steps, gradwire's and written down
anew, in float64.

    python benchmarks/half_step.py                  # two minutes; writes benchmarks/results/half-step.json and prints a table
    python benchmarks/half_step.py --seeds 1 --epochs 1 --output /tmp/half-step.json

Two replicas in one process train an MLP of two hidden layers to tell ten clouds of points apart:
SGD with momentum 0.9, learning rate with warm-up and cosine. "reference" is epfml/powersgd's
alternation (Vogels et al. 2019; one multiplication per step), independently, with QR and the error
against what was received: where it falls as gradwire falls, it is the method. Accuracies are of
1,000 points that were not trained on.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from epfml import HalfSteps
from measuring import save

from gradwire import AllReduce, PowerSGD, Simulator

NDArray = npt.NDArray[np.float64]
Tree = dict[str, NDArray]
#: One gradient per replica → their average, as the optimizer is given it.
Average = Callable[[list[Tree]], Tree]

REPLICAS = 2
BATCH = 16
TRAINED, TESTED = 1500, 1000
SHAPES = {
    "w1": (128, 32),
    "b1": (128,),
    "w2": (128, 128),
    "b2": (128,),
    "w3": (10, 128),
    "b3": (10,),
}
MOMENTUM = 0.9
WARM_UP = 20


def subjects(seed: int) -> Iterator[tuple[str, Average, float | None]]:
    """Name, how gradients are averaged, and the norm to which the average is clipped."""

    def ours(algorithm: Any) -> Average:
        return Simulator(algorithm, SHAPES, REPLICAS).step

    yield "dense", ours(AllReduce()), None
    for rank in (1, 2, 4):
        yield f"rank {rank}", ours(PowerSGD(rank, seed=seed)), None
        yield f"rank {rank}, half-step", ours(PowerSGD(rank, half_step=True, seed=seed)), None
        yield f"rank {rank}, half-step, reference", HalfSteps(SHAPES, REPLICAS, rank, seed), None
    yield "rank 1, clipped to 1", ours(PowerSGD(1, seed=seed)), 1.0
    yield "rank 1, half-step, clipped to 1", ours(PowerSGD(1, half_step=True, seed=seed)), 1.0


def forward(weights: Tree, x: NDArray) -> list[NDArray]:
    """Activations of each layer, logits last."""
    first = np.maximum(x @ weights["w1"].T + weights["b1"], 0)
    second = np.maximum(first @ weights["w2"].T + weights["b2"], 0)
    return [first, second, second @ weights["w3"].T + weights["b3"]]


def gradient(weights: Tree, x: NDArray, labels: npt.NDArray[np.int64]) -> Tree:
    """Of the mean cross-entropy."""
    first, second, logits = forward(weights, x)
    d = np.exp(logits - logits.max(axis=1, keepdims=True))
    d /= d.sum(axis=1, keepdims=True)
    d[np.arange(len(labels)), labels] -= 1
    d /= len(labels)
    found = {"w3": d.T @ second, "b3": d.sum(axis=0)}
    d = (d @ weights["w3"]) * (second > 0)
    found |= {"w2": d.T @ first, "b2": d.sum(axis=0)}
    d = (d @ weights["w2"]) * (first > 0)
    return {name: (found | {"w1": d.T @ x, "b1": d.sum(axis=0)})[name] for name in SHAPES}


def initial(random: np.random.Generator, scale: float = 1.0) -> Tree:
    return {
        name: scale * random.standard_normal(shape) * np.sqrt(2 / shape[-1])
        if len(shape) == 2
        else np.zeros(shape)
        for name, shape in SHAPES.items()
    }


def data() -> tuple[NDArray, npt.NDArray[np.int64]]:
    """Points round ten centres, and which one; the same for every seed."""
    random = np.random.default_rng(0)
    centres = 1.5 * random.standard_normal((10, 32))
    labels = random.integers(10, size=TRAINED + TESTED)
    return (centres[labels] + 2.0 * random.standard_normal((TRAINED + TESTED, 32))) / 5, labels


def accuracy(average: Average, rate: float, seed: int, epochs: int, clip: float | None) -> float:
    """Of a training, in percent; chance is 10."""
    x, labels = data()
    random = np.random.default_rng(seed + 1)
    weights = initial(random)
    velocity = {name: np.zeros_like(w) for name, w in weights.items()}
    per_epoch = TRAINED // (BATCH * REPLICAS)
    for step in range(per_epoch * epochs):
        if step % per_epoch == 0:
            order = random.permutation(TRAINED)
        start = step % per_epoch * BATCH * REPLICAS
        batches = [order[start + r * BATCH : start + (r + 1) * BATCH] for r in range(REPLICAS)]
        # a training may fall apart: that is what is looked for
        with np.errstate(over="ignore", invalid="ignore"):
            averages = average([gradient(weights, x[i], labels[i]) for i in batches])
            norm = float(np.sqrt(sum(np.sum(g**2) for g in averages.values())))
            factor = 1.0 if clip is None or norm <= clip else clip / norm
            now = (
                rate
                * min(1.0, (step + 1) / WARM_UP)
                * 0.5
                * (1 + np.cos(np.pi * step / (per_epoch * epochs)))
            )
            for name in SHAPES:
                velocity[name] = MOMENTUM * velocity[name] + factor * averages[name]
                weights[name] = weights[name] - now * velocity[name]
    predicted = np.argmax(forward(weights, x[TRAINED:])[-1], axis=1)
    return float(np.mean(predicted == labels[TRAINED:]) * 100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.2, 0.25, 0.3])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "half-step.json"
    )
    args = parser.parse_args()
    rows: dict[str, dict[str, list[float]]] = {}
    for rate in args.rates:
        for seed in range(args.seeds):
            for name, average, clip in subjects(seed):
                rows.setdefault(name, {}).setdefault(str(rate), []).append(
                    accuracy(average, rate, seed, args.epochs, clip)
                )
                print(f"\rlearning rate {rate}, seed {seed}: {name:<40}", end="", flush=True)
    print(f"\r{'accuracy, %':<60}" + "".join(f"lr {rate:<14}" for rate in args.rates))
    for name, by_rate in rows.items():
        cells = [f"{np.mean(found):5.1f} ± {np.std(found):4.1f}" for found in by_rate.values()]
        print(f"{name:<60}" + "".join(f"{cell:<17}" for cell in cells))
    save(
        {
            "machine": f"{platform.machine()}, NumPy {np.__version__}, float64",
            "epochs": args.epochs,
            "accuracy_percent": rows,
        },
        args.output,
    )


if __name__ == "__main__":
    main()
