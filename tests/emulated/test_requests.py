"""Every request on an emulated accelerator: with the collectives of NCCL, and with those that a library without them has."""

import pytest
import torch.distributed as dist

from tests.emulated.build import shared_library
from tests.emulated.ways import native_collectives
from tests.torch.asked import ASKED, Answered, answered, require_right
from tests.torch.ranks import Cases

cases = Cases(__file__, ranks=3)
EXCHANGES = [name for name in ASKED if name.startswith(("a gather", "an all-", "a reduce-"))]
VARIANTS = [*((name, "NCCL") for name in ASKED), *((name, "another") for name in EXCHANGES)]


@pytest.fixture(scope="module", autouse=True)
def _built():
    shared_library()


@cases.each({f"{name}, {library}": (name, library) for name, library in VARIANTS})
def asked(world, variant):
    from tests.emulated.device import DEVICE, core, watched
    from tests.emulated.process_group import BACKEND

    name, library = variant
    group = dist.new_group(backend=BACKEND)
    watched.clear()
    with native_collectives(BACKEND if library == "NCCL" else "nccl"):
        seen = answered(name, group, DEVICE)
    return vars(seen), watched.problems, core.messages_on_their_way()


@pytest.mark.parametrize(("name", "library"), VARIANTS)
def test_a_request_is_answered_as_the_core_says(results, name, library):
    seen = results(f"asked[{name}, {library}]")
    for _, problems, on_their_way in seen:
        assert (problems, on_their_way) == ([], 0)
    require_right(name, [Answered(**own) for own, _, _ in seen])
