"""Turns of large work on the event loop."""

import asyncio
from time import perf_counter

import pytest
import uvloop

from serve_app.compute import turns as module
from serve_app.compute.turns import Turns


class Rounds:
    """Counts the rounds of the event loop."""

    def __init__(self) -> None:
        self.now = 0
        self._go()

    def _go(self) -> None:
        self.now += 1
        self._handle = asyncio.get_running_loop().call_soon(self._go)

    def stop(self) -> None:
        self._handle.cancel()


async def rounds_of_turns(count: int, leaves: int | None = None) -> list[tuple[int, int]]:
    """(the caller, the round of its turn) of `count` callers that ask at once. Caller `leaves` goes away before its turn."""
    turns, rounds, given = Turns(), Rounds(), list[tuple[int, int]]()

    async def work(caller: int) -> None:
        async with turns.turn():
            given.append((caller, rounds.now))

    tasks = [asyncio.create_task(work(caller)) for caller in range(count)]
    await asyncio.sleep(0)
    if leaves is not None:
        tasks[leaves].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    rounds.stop()
    return given


def test_turns_come_in_different_rounds_in_order_of_arrival() -> None:
    given = asyncio.run(rounds_of_turns(5))
    assert [caller for caller, _ in given] == [0, 1, 2, 3, 4]
    assert len({each for _, each in given}) == 5, given


def test_a_caller_that_leaves_uses_no_turn() -> None:
    given = asyncio.run(rounds_of_turns(4, leaves=1))
    assert [caller for caller, _ in given] == [0, 2, 3]


def test_a_caller_that_leaves_with_its_turn_gives_the_turn_back() -> None:
    async def test() -> None:
        turns = Turns()

        async def work() -> None:
            async with turns.turn():
                await asyncio.sleep(60)

        first, second = asyncio.create_task(work()), asyncio.create_task(work())
        await asyncio.sleep(0)
        first.cancel()
        second.cancel()
        async with asyncio.timeout(10), turns.turn():
            pass

    asyncio.run(test())


def test_one_caller_has_one_turn_in_a_round() -> None:
    async def test() -> None:
        turns, rounds, given = Turns(), Rounds(), list[int]()
        for _ in range(4):
            async with turns.turn():
                given.append(rounds.now)
        rounds.stop()
        assert len(set(given)) == 4, given

    asyncio.run(test())


def test_a_turn_that_waits_for_a_thread_has_no_other_turn_beside_it() -> None:
    async def test() -> None:
        turns, running, most = Turns(), 0, 0

        async def work() -> None:
            nonlocal running, most
            async with turns.turn():
                running += 1
                most = max(most, running)
                await asyncio.sleep(0)
                running -= 1

        await asyncio.gather(*(work() for _ in range(3)))
        assert most == 1

    asyncio.run(test())


def test_large_work_rests_while_a_small_request_is_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REST", float("inf"))
    monkeypatch.setattr(module, "_MOST_REST_S", 60.0)

    async def test() -> None:
        turns = Turns()
        with turns.small:
            async with turns.turn():
                pass
            second = asyncio.create_task(_one(turns))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not second.done()
        await asyncio.wait_for(second, 10)  # no small request is left, so the rest is over

    asyncio.run(test())


def test_small_requests_put_large_work_off_for_a_limited_time() -> None:
    async def test() -> None:
        turns = Turns()
        with turns.small:
            for _ in range(3):
                await asyncio.wait_for(_one(turns), 10)

    asyncio.run(test())


async def _one(turns: Turns) -> None:
    async with turns.turn():
        await asyncio.sleep(0)


def test_a_rest_of_less_than_a_millisecond_is_one_timer() -> None:
    """uvloop runs a timer of less than half a millisecond at once, so one after the other until the rest is over."""

    async def scenario() -> None:
        turns, num_calls = Turns(), 0
        give = turns._give

        def counted() -> None:
            nonlocal num_calls
            num_calls += 1
            give()

        turns._give = counted  # type: ignore[method-assign]
        turns.num_small, turns._rests_until = 1, perf_counter() + 0.0004
        async with turns.turn():
            assert num_calls <= 3

    uvloop.run(scenario())
