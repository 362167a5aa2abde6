"""Distributes the files of `make test` to workers: two workers run the tests that start Ray, the third one runs the others.

A test that starts Ray mostly waits. So two such tests leave time for other tests on two cores. With a third Ray, nodes would
start too slowly: Ray's time limit for the start of a node is 30 s.
"""

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

NUM_WORKERS = 3
WITHOUT_RAY = f"gw{NUM_WORKERS - 1}"
_RAY = ("tests/cluster/", "tests/serve/")
# The slowest files and folders, the slowest first. If a slow file began last, the other workers would wait for it.
# test_node_command is not among the first: beside the linters of CI, Ray has failed to start its nodes.
_LONGEST = (
    "tests/serve/test_gateway.py",
    "tests/cluster/test_lab.py",
    "tests/serve/test_behaviour.py",
    "tests/serve/test_deploy.py",
    "tests/cluster/",
    "tests/serve/",
    "tests/deploy/",
    "tests/parity/",
)


def rank(nodeid: str) -> int:
    """The position in `_LONGEST` of the test's file or folder. A sort by this rank keeps the tests of a file together."""
    return next((rank for rank, path in enumerate(_LONGEST) if nodeid.startswith(path)), len(_LONGEST))


class RayApart(LoadFileScheduling):
    """A worker gets whole files, in their order. The worker without Ray gets files with Ray only after all other files."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node.gateway.id == WITHOUT_RAY:
            chosen = next((path for path in self.workqueue if not path.startswith(_RAY)), None)
            if chosen is not None:
                self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)
