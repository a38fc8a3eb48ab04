"""How long messages take: the α-β model."""

from __future__ import annotations

from gradwire.core.plan.traffic import Traffic
from gradwire.core.text.options import Positive, Replicas, Seconds, checked


@checked
def step_seconds(traffic: Traffic, world_size: Replicas, latency: Seconds, bandwidth: Positive) -> float:
    """α-β time of a step's ring all-reduces: 2(W-1) hops each, 2(W-1)/W of the payload over each link (Thakur et al. 2005, §4).

    Args:
        traffic: of the step.
        world_size: W.
        latency: α, seconds per hop.
        bandwidth: 1/β, bytes per second of one link, each direction.

    Raises:
        ValueError: nobody, or a link that carries nothing.
    """
    return ring_seconds(traffic.collectives, traffic.nbytes, world_size, latency, bandwidth)


def ring_seconds(collectives: float, nbytes: float, world_size: int, latency: float, bandwidth: float) -> float:
    """`step_seconds` of so many messages, and bytes in all."""
    hops = 2 * (world_size - 1)
    return collectives * hops * latency + hops / world_size * nbytes / bandwidth
