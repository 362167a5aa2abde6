"""Turns of large work on the event loop."""

import asyncio
from itertools import pairwise

from serve_app.compute.turns import _ROUNDS, Turns


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
        await turns.turn()
        given.append((caller, rounds.now))

    tasks = [asyncio.create_task(work(caller)) for caller in range(count)]
    await asyncio.sleep(0)
    if leaves is not None:
        tasks[leaves].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    rounds.stop()
    return given


def test_a_turn_comes_every_few_rounds_in_order_of_arrival() -> None:
    given = asyncio.run(rounds_of_turns(5))
    assert [caller for caller, _ in given] == [0, 1, 2, 3, 4]
    gaps = [later - earlier for (_, earlier), (_, later) in pairwise(given)]
    assert all(gap >= _ROUNDS for gap in gaps), gaps


def test_a_caller_that_leaves_uses_no_turn() -> None:
    given = asyncio.run(rounds_of_turns(4, leaves=1))
    assert [caller for caller, _ in given] == [0, 2, 3]
    everyone = asyncio.run(rounds_of_turns(3))
    assert given[-1][1] - given[0][1] == everyone[-1][1] - everyone[0][1]


def test_without_others_the_turn_comes_at_once() -> None:
    async def test() -> None:
        turns, rounds = Turns(), Rounds()
        for _ in range(2):
            before = rounds.now
            await turns.turn()
            assert rounds.now == before
            while rounds.now < before + 2 * _ROUNDS:
                await asyncio.sleep(0)
        rounds.stop()

    asyncio.run(test())
