"""Events that the engine's threads pass to an event loop."""

import asyncio
import threading

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
        for number in range(100):
            delivery.add(heard.append, number)
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

        def compute() -> None:
            for number in range(20_000):
                delivery.add(heard.append, number)
                delivery.wake()

        thread = threading.Thread(target=compute)
        thread.start()
        await asyncio.to_thread(thread.join)
        await asyncio.sleep(0)
        return heard

    assert asyncio.run(scenario()) == list(range(20_000))


def test_a_loop_that_is_closed_is_left_alone() -> None:
    loop = asyncio.new_event_loop()
    delivery = Delivery(loop)
    loop.close()
    delivery.add(print, "nobody waits")
    delivery.wake()
