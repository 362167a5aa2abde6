"""Distributes the files of `make test` to workers: two workers run the tests that start Ray, the third one runs the others.

Tests that start Ray mostly wait, so two of them leave time on two cores. A third Ray would be too slow: Ray gives a node 30 s
to start.
"""

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

NUM_WORKERS = 3
WITHOUT_RAY = f"gw{NUM_WORKERS - 1}"
_RAY = ("tests/cluster/", "tests/serve/")
# Files and folders that take longest, longest first. A worker that began one of them last would keep the others waiting.
# The nodes of test_node_command start later than the others, because Ray has failed to start there beside the linters of CI.
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
    """The position in `_LONGEST` of the test's file or folder. A sort by it keeps the tests of a file together."""
    return next((rank for rank, path in enumerate(_LONGEST) if nodeid.startswith(path)), len(_LONGEST))


class RayApart(LoadFileScheduling):
    """A worker gets whole files, in their order. One worker gets a file with Ray only once no other file is left."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node.gateway.id == WITHOUT_RAY:
            chosen = next((path for path in self.workqueue if not path.startswith(_RAY)), None)
            if chosen is not None:
                self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)
