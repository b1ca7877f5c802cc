"""Skips what needs a CUDA device where there is none, and stops the processes of ``tests.world``."""

import gc
import os
from collections.abc import Iterator

# Products of the same matrices are the same to the bit wherever these lie in memory; read when torch is imported.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

import pytest
import torch
import torch.distributed as dist

from tests.hosts import Host, NoHostsError, two_hosts
from tests.world import shut_down


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Leave out, of each collection of garbage and each search among live objects, what has been imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _ranks() -> Iterator[None]:
    yield
    shut_down()


@pytest.fixture
def nccl() -> Iterator[None]:
    """A process group of one rank on the first device."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a wire between them."""
    try:
        with two_hosts() as made:
            yield made
    except NoHostsError as error:
        pytest.skip(f"no network namespaces: {error}")
