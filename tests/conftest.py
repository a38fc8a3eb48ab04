"""Before anything imports a framework: four JAX devices on the CPU, and one thread per process."""

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.bounds import watch_this_process
from tests.frames import with_room
from tests.launch import quickly_compiled, take_device_branch, xla_flags

# Set, not defaulted: these tests count devices and bits. Processes that tests start inherit it.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = quickly_compiled(xla_flags("--xla_force_host_platform_device_count=4"))
# Many small processes on few cores: threads would only fight. Sums also keep their order.
for variable in (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
):
    os.environ[variable] = "1"

# The same examples in every run; `HYPOTHESIS_PROFILE=explore make test` looks for new ones.
_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, max_examples=30, suppress_health_check=_quiet
)
settings.register_profile(
    "explore", deadline=None, max_examples=500, suppress_health_check=_quiet, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

#: So many pieces of memory are some 1,000 compiled programs.
MAPS = 4_000

_branch = take_device_branch()
watch_this_process()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> object:
    """All tests run where deep calls cost nothing more."""
    loop = session.config.pluginmanager.subset_hook_caller(
        "pytest_runtestloop", [sys.modules[__name__]]
    )
    return with_room(loop, session=session)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without looking for garbage, which was a quarter of the time it took: frameworks and
    thousands of tests are objects that stay. They are set aside, and what tests make is looked
    through less often than Python would."""
    gc.disable()
    collected = yield
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    return collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file is run by one process. Long ones come first, so that all end together; those that need
    the emulated device after the one that builds it, so that nobody waits for that."""

    def place(item: pytest.Item) -> int:
        folder, file = item.path.parent.name, item.path.name
        if file in ("test_benchmarks.py", "test_pages.py"):
            return 0
        return (
            3
            if folder in ("core", "tests")
            else 2
            if folder == "emulated" and file != "test_ways.py"
            else 1
        )

    items.sort(key=place)
    unlike = [item.nodeid for item in items if " at 0x" in item.nodeid]
    assert not unlike, f"an address is in a name that all processes must have alike: {unlike}"


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Generator[None, None, None]:
    """What XLA has compiled is dropped where it is much. A program keeps 1.6 MB and three pieces of
    memory, of which Linux allows a process 65,530."""
    yield
    jax, maps = sys.modules.get("jax"), Path("/proc/self/maps")
    if jax is not None and maps.exists() and maps.read_bytes().count(b"\n") > MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def results_of(request, tmp_path_factory):
    """What the cases of a file returned, see `tests/torch/ranks.py`, on a number of ranks, which
    are started once."""
    yield from request.module.cases.launched(request, tmp_path_factory)


@pytest.fixture(scope="module")
def results(request, results_of):
    return results_of(request.module.cases.ranks[0])


@pytest.fixture
def ranks(request):
    return request.module.cases.ranks[0]


@pytest.fixture
def variant():
    """Of a case that has none."""


@pytest.fixture(scope="session")
def float16_in_jax() -> None:
    """For what computes in float16 in JAX. Without F16C, which every processor with AVX2 has, XLA
    compiles no such program: a call of `__extendhfsf2` stays unresolved. jaxlib itself runs on no
    such processor, but XLA can be told to compile for one."""
    import jax
    import jax.numpy as jnp

    try:
        jax.block_until_ready(jnp.ones(3, jnp.float16) + 1)
    except jax.errors.JaxRuntimeError as error:
        if "--xla_cpu_max_isa=SSE4_2" not in os.environ["XLA_FLAGS"]:
            raise
        pytest.skip(f"XLA compiles no float16 for SSE4.2: {error}")
