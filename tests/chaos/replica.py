"""One replica of a run under chaos. It writes a line for each vote, and ends after the round that
the file `stop` says.

It learns to sort. The data are those of its number at the position of the run, so a newcomer goes
on where the others are.
"""

import json
import logging
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

import gradwire
from gradwire.torch_backend import elastic
from tests.chaos.sorting import batch, digest, loss_of, new_model


def group_of(number: int, port: str) -> dist.ProcessGroup:
    """Of torchft; or torch's own, whose replicas meet in the store at this port."""
    timeout = timedelta(seconds=5)
    if not port:
        return ProcessGroupGloo(timeout=timeout)
    store = dist.TCPStore("localhost", int(port), is_master=False, wait_for_workers=False)
    options = {"rank": number, "world_size": number + 1, "timeout": timeout}
    dist.init_process_group("gloo", store=store, enable_reconfigure=True, **options)
    return dist.group.WORLD


def main(
    name: str,
    seed: int,
    what: str,
    seconds: int,
    stop: Path,
    lighthouse: str,
    pace: float,
    port: str,
) -> None:
    """Train until told to stop. `pace`: seconds between two steps; `port`: see `group_of`."""
    number = int(name.removeprefix("replica"))
    signal.alarm(seconds)  # ends the process, whatever it does
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    alone = {"rank": 0, "world_size": 1, "store_addr": "localhost", "store_port": store.port}
    manager = Manager(
        pg=group_of(number, port),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=8),
        quorum_timeout=timedelta(seconds=60),
        quorum_retries=20,
        replica_id=name,
        lighthouse_addr=lighthouse,
        **alone,
    )
    votes: list[bool] = []
    vote = manager.should_commit

    def voted(*args, **options) -> bool:
        votes.append(vote(*args, **options))
        return votes[-1]

    manager.should_commit = voted
    wanted = {"die": False}
    signal.signal(signal.SIGUSR1, lambda *_: wanted.update(die=True))

    def say(**what) -> None:
        print(
            json.dumps({"name": name, "pid": os.getpid(), "time": time.time()} | what), flush=True
        )

    ask, asked = manager.start_quorum, []

    def asks(*args, **options) -> None:
        if not asked:
            say(event="asks")
        asked.append(True)
        ask(*args, **options)

    manager.start_quorum = asks
    algorithm = eval(what, vars(gradwire))
    handle = elastic(model, optimizer, algorithm, manager)
    schedule = isinstance(algorithm, gradwire.LocalSGD)
    equal = (
        handle.outer_parameters
        if schedule and algorithm.has_outer
        else lambda: dict(model.named_parameters())
    )

    def note() -> None:
        for taken in votes:
            say(
                event="vote",
                taken=taken,
                round=handle.rounds,
                steps=handle.steps,
                outer=digest(equal().values()),
            )
        votes.clear()

    note()
    while not (last := stop.read_text()) or handle.rounds < int(last):
        x, y = batch(seed, number, handle.steps)
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        note()
        if wanted["die"] and getattr(handle, "_left", True) is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(pace)
    model.load_state_dict(equal(), strict=False)
    with torch.no_grad():
        loss = sum(float(loss_of(model, *batch(12345, 0, step))) for step in range(64)) / 64
    say(event="ends", loss=loss, sent=handle.sent.nbytes)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    name, seed, what, seconds, stop, lighthouse, pace, port = sys.argv[1:]
    main(name, int(seed), what, int(seconds), Path(stop), lighthouse, float(pace), port)
