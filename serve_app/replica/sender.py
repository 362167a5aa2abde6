"""Sends bytes on a connection's socket from any thread."""

import asyncio
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from serve_app.gateway.frames import Payload

# The most bytes that are sent in one round of the event loop. The kernel takes a millisecond for 3 MB on a local connection, and
# short answers would wait for it.
_AT_ONCE_BYTES = 1 << 18


class Sender:
    """Sends on a connection's socket, in the order of the calls. The connection's transport only reads.

    A transport sends only on its event loop. The engine's threads would have to wake up the loop for each message, and then wait
    for the interpreter while the loop works (docs/decisions/060).
    """

    def __init__(self, transport: asyncio.BaseTransport, on_empty: Callable[[], None]) -> None:
        """
        Args:
            on_empty: called on the event loop when all waiting bytes are sent, so `is_full` is False again.
        """
        # A duplicate, because the transport may close its own descriptor while another thread sends.
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self._socket.setblocking(False)
        self._loop, self._on_empty = asyncio.get_running_loop(), on_empty
        self._rest = deque[memoryview]()
        self._is_closed = False
        self.lock = threading.RLock()  # callers may hold it while they choose the next message

    @property
    def is_full(self) -> bool:
        """Whether the socket takes no more bytes at the moment. Further bytes wait in memory."""
        return bool(self._rest)

    def send(self, *parts: Payload) -> None:
        """Sends the parts, one after the other. Any thread may call this. Does nothing after `close`."""
        with self.lock:
            if self._is_closed:
                return
            if self._rest:
                self._rest.extend(map(memoryview, parts))
                return
            sent = self._send(parts) if sum(map(len, parts)) <= _AT_ONCE_BYTES else 0
            for part in parts:
                if sent < len(part):
                    self._rest.append(memoryview(part)[sent:])
                sent = max(0, sent - len(part))
            if self._rest:
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._wait)

    def close(self) -> None:
        """Closes the descriptor. Called on the event loop."""
        with self.lock:
            if not self._is_closed:
                self._is_closed = True
                self._rest.clear()
                self._loop.remove_writer(self._socket)
                self._socket.close()

    def _send(self, parts: tuple[Payload, ...]) -> int:
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError:  # the transport reads the same error, and ends the connection
            return sum(map(len, parts))

    def _wait(self) -> None:
        if not self._is_closed:
            self._loop.add_writer(self._socket, self._send_rest)

    def _send_rest(self) -> None:
        with self.lock:
            room = _AT_ONCE_BYTES
            while self._rest:
                part = self._rest.popleft()
                sent = self._send((part[:room],))
                room -= sent
                if sent < len(part):  # the socket is full, or other work of the event loop comes first
                    self._rest.appendleft(part[sent:])
                    return
            self._loop.remove_writer(self._socket)
        self._on_empty()
