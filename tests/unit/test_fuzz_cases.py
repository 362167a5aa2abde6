"""The fuzzer's cases: they depend only on the seed, a file reproduces them, and they cover all POST routes."""

from itertools import islice

import pytest

from loadtests.fuzz_bodies import VALID
from loadtests.fuzz_cases import Case, Site, cases, operations
from serve_app.http.openapi import document

MODELS = ["all-MiniLM-L6-v2", "SmolLM2-135M-Instruct"]


def made(seed: int) -> list[Case]:
    return list(islice(cases(seed, Site(1, 2), document(""), MODELS), 1000))


@pytest.mark.slow
def test_the_seed_decides_the_cases() -> None:
    assert made(1) == made(1) != made(2)


def test_a_case_survives_a_file() -> None:
    assert [Case.from_json(case.to_json()) for case in made(3)] == made(3)


def test_every_post_route_has_valid_bodies() -> None:
    assert set(operations(document(""))) == set(VALID)
