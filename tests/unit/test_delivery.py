"""Events that the engine's threads pass to an event loop."""

import asyncio
import threading
from typing import Any

import numpy as np

from engine.schedule.stream import Token
from serve_app.compute.delivery import Delivery


def test_one_wake_up_carries_all_events_of_a_pass_in_order() -> None:
    async def scenario() -> tuple[list[int], int]:
        loop, heard, wakes = asyncio.get_running_loop(), list[int](), 0
        call_soon_threadsafe = loop.call_soon_threadsafe

        def counted(*args: object) -> object:
            nonlocal wakes
            wakes += 1
            return call_soon_threadsafe(*args)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = counted  # type: ignore[assignment, method-assign]
        delivery = Delivery(loop)
        key = delivery.key(heard.append)
        for number in range(100):
            delivery.add(key, number)
        assert heard == []
        delivery.wake()
        delivery.wake()
        await asyncio.sleep(0)
        delivery.wake()  # nothing is left
        return heard, wakes

    assert asyncio.run(scenario()) == (list(range(100)), 1)


def test_no_event_is_lost_between_two_threads() -> None:
    async def scenario() -> list[int]:
        heard: list[int] = []
        delivery = Delivery(asyncio.get_running_loop())
        key = delivery.key(heard.append)

        def compute() -> None:
            for number in range(20_000):
                delivery.add_last(key, number)

        thread = threading.Thread(target=compute)
        thread.start()
        await asyncio.to_thread(thread.join)
        await asyncio.sleep(0)
        return heard

    assert asyncio.run(scenario()) == list(range(20_000))


def test_a_receiver_gets_its_own_events_until_it_is_forgotten() -> None:
    """`add` and `add_each` keep one order. Later events of a forgotten receiver go nowhere."""

    async def scenario() -> tuple[list[Any], list[Any]]:
        one, two = list[Any](), list[Any]()
        delivery = Delivery(asyncio.get_running_loop())
        first, second = delivery.key(one.append), delivery.key(two.append)
        delivery.add(first, "a")
        delivery.add_each(np.array([second, first, first], np.int32), np.array([5, 6, 7], np.int32))
        delivery.add_last(second, "b")
        await asyncio.sleep(0)
        delivery.forget(first)
        delivery.add_each(np.array([first, second], np.int32), np.array([8, 9], np.int32))
        delivery.add_last(first, "c")
        await asyncio.sleep(0)
        return one, two

    assert asyncio.run(scenario()) == (["a", Token(6), Token(7)], [Token(5), "b", Token(9)])


def test_a_loop_that_is_closed_is_left_alone() -> None:
    loop = asyncio.new_event_loop()
    delivery = Delivery(loop)
    key = delivery.key(print)
    loop.close()
    delivery.add_last(key, "nobody waits")
