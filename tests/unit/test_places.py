"""The places for requests in flight: a slow model does not use the places of other models."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.settings import ServerSettings
from serve_app.admission.admission import Admission
from serve_app.errors import Overloaded
from serve_app.observe.metrics import Metrics

BACKLOG = {None: 1.0, "slow": 30.0, "quick": 2.0}


def _model(name: str) -> Any:
    return SimpleNamespace(info=SimpleNamespace(served_model_name=name))


def _filled(admission: Admission, stack: ExitStack, name: str | None) -> tuple[int, str]:
    """The number of admitted requests to a model, and the `retry-after` of the next one."""
    count = 0
    while True:
        try:
            stack.enter_context(admission.admit(1, name and _model(name)))
        except Overloaded as error:
            return count, error.headers["retry-after"]
        count += 1


def _admission(most: int, num_models: int) -> Admission:
    settings = ServerSettings(max_concurrent_requests=most)
    return Admission(settings, Metrics("places"), lambda name: BACKLOG[name], num_models)


def test_a_slow_model_leaves_the_others_their_places() -> None:
    admission = _admission(12, 2)
    with ExitStack() as stack:
        assert _filled(admission, stack, "slow") == (9, "30")  # three own places and six shared ones
        assert _filled(admission, stack, None) == (0, "1")
        with ExitStack() as inner:
            assert _filled(admission, inner, "quick") == (3, "2")
        assert _filled(admission, stack, "quick") == (3, "2")  # its own places are free again
    with ExitStack() as stack:
        assert _filled(admission, stack, "quick") == (9, "2")  # all places are free again


@pytest.mark.parametrize("name", ["slow", None])
def test_one_model_has_all_places(name: str | None) -> None:
    with ExitStack() as stack:
        assert _filled(_admission(7, 1), stack, name)[0] == 7


def test_few_places_are_common() -> None:
    with ExitStack() as stack:
        assert _filled(_admission(3, 2), stack, "slow")[0] == 3
