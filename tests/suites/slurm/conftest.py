"""The cluster of these tests."""

import os
from pathlib import Path

import pytest

from support import slurm
from support.slurm import Cluster, Command


@pytest.fixture(scope="session")
def _daemons():
    scratch = os.environ.get("SPARSEPRETRAIN_TEST_SLURM")
    if scratch is None:
        pytest.skip("started by make test-slurm")
    root = Path(scratch) / "slurm"
    root.mkdir()
    cluster = Cluster(root)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(_daemons):
    yield _daemons
    _daemons.clear()


class Study:
    """``train -m`` of tiny runs as jobs."""

    def __init__(self, tiny):
        self.tiny, self.runs = tiny, tiny.root / "runs/cells"

    def words(self, *words, own=()):
        launcher = ["hydra/launcher=submitit_slurm", "hydra.launcher.gpus_per_node=0"]
        return ["train", "-m", *self.tiny.overrides(*words, "name=cells"), *launcher, *own]

    def start(self, *words, own=()):
        return Command(self.words(*words, own=own), self.tiny.root)

    def trains(self, count=1, least=5):
        slurm.wait_for(
            lambda: sum(n >= least for n in slurm.steps(self.runs).values()) >= count, 180
        )


@pytest.fixture
def study(cluster, tiny):
    return Study(tiny)
