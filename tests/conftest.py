"""What tests share: one Ray for the whole run, started when the first test asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray with 6 CPUs by name, whatever the machine has: ranks here are small."""
    import ray

    ray.init(num_cpus=6, num_gpus=0, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()
