"""Bytes that several threads send on one connection."""

import asyncio
import socket
import threading

import pytest

from serve_app.replica.sender import Sender


class Receiver(asyncio.Protocol):
    """The side that has the sender. Its transport only reads."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.empty = 0
        self.sender = Sender(transport, self._on_empty)

    def _on_empty(self) -> None:
        self.empty += 1

    def connection_lost(self, _: Exception | None) -> None:
        self.sender.close()


@pytest.mark.parametrize("library", ["asyncio", "uvloop"])
def test_bytes_of_several_threads_arrive_whole_and_in_order_also_if_nobody_reads_for_a_while(library: str) -> None:
    async def scenario() -> None:
        here, there = socket.socketpair()
        for end in (here, there):
            end.setblocking(False)
        _, receiver = await asyncio.get_running_loop().create_connection(Receiver, sock=here)

        def send(name: int) -> None:
            for number in range(2_000):
                receiver.sender.send(bytes([name]), number.to_bytes(2, "big") * 200)

        threads = [threading.Thread(target=send, args=(name,)) for name in range(3)]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])
        assert receiver.sender.is_full  # 2.4 MB are more than a socket takes
        assert receiver.empty == 0
        reader, writer = await asyncio.open_connection(sock=there)
        last = [-1, -1, -1]
        for _ in range(6_000):
            message = await asyncio.wait_for(reader.readexactly(401), 5)
            number = int.from_bytes(message[1:3], "big")
            assert message[1:] == message[1:3] * 200
            assert number == last[message[0]] + 1
            last[message[0]] = number
        assert (receiver.sender.is_full, receiver.empty) == (False, 1)
        receiver.sender.send(b"and later")
        assert await asyncio.wait_for(reader.readexactly(9), 5) == b"and later"
        writer.close()
        while receiver.sender._socket.fileno() != -1:
            await asyncio.sleep(0.001)
        receiver.sender.send(b"to nobody")

    loops = asyncio if library == "asyncio" else pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=loops.new_event_loop) as runner:
        runner.run(scenario())
