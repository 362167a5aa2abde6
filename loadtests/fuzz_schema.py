"""Bodies that schemathesis generates from the OpenAPI document: valid ones, and ones that break the schema in one place."""

import logging
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.generation import GenerationMode

from loadtests.fuzz_bodies import Generated


def generated(document: dict[str, Any], number: int, start: int) -> Generated:
    """About `number` bodies for the POST routes of the document; `start` decides them. A body takes about 12 ms."""
    logging.getLogger("schemathesis").setLevel(logging.ERROR)
    operations = [each.ok() for each in schemathesis.openapi.from_dict(document).get_all_operations()]
    posts = [each for each in operations if each.method == "post"]
    each_way = max(1, number // (2 * len(posts)))
    return {
        post.path: [
            body for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) for body in _bodies(post, mode, each_way, start)
        ]
        for post in posts
    }


def _bodies(operation: Any, mode: GenerationMode, number: int, start: int) -> list[Any]:
    found: list[Any] = []

    @seed(start)
    @settings(max_examples=number, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def collect(case: Any) -> None:
        if isinstance(case.body, dict | list | str | int | float | bool | None):  # not bytes, and not without a body
            found.append(case.body)

    collect()
    return found
