"""Carries passes between the processes of a pipeline, in a ring: from each stage to the next one, from the last to the first.

torch.distributed moves the data, with gloo. Hidden states of GPUs go through the host's memory. In each process one thread sends
and one receives, so that the stage computes meanwhile. They wait without polling. A message comes before its hidden states, so
that the next stage prepares its pass while they are computed. Each process sends at least every `_BEAT_S`. A process whose
connection breaks, or that is silent for `SILENT_S`, ends the whole ring: an error reaches every process.
"""

import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from engine.devices import begin_thread
from engine.errors import DeviceLost, EngineStopped
from engine.run.arrivals import Arrivals, Arriving
from engine.run.departures import Leaving

SILENT_S = 20.0
_BEAT_S = 2.0
# All processes join within this time. Their weights are loaded before.
_JOIN_S = 60.0
# The numbers of a message's first transfer, which hold all of `about` in most messages. Each transfer of gloo takes 0.1 ms.
_HEAD = 1024
_SILENT, _JOIN = timedelta(seconds=SILENT_S), timedelta(seconds=_JOIN_S)
_TCPStore = dist.TCPStore  # type: ignore[attr-defined]


class Kind(IntEnum):
    BEAT = 0  # nothing to do
    PASS = 1  # `about` describes the pass, its hidden states follow
    FAILED = 2  # a stage has failed to compute a pass; `about` has the bytes of the error's text
    END = 3  # the ring ends in order
    LOST = 4  # the ring ends, because a process is lost; `about` has the bytes of the error's text


class Message(NamedTuple):
    """What one stage tells the next one. Messages arrive in the order in which they were sent."""

    kind: Kind
    about: NDArray[np.int32]
    hidden: Tensor | Leaving | None = None  # [n, C], on the CPU


class Received(NamedTuple):
    """A message that has come, except BEAT, END and LOST."""

    kind: Kind
    about: NDArray[np.int32]
    hidden: Arriving | None = None


NOTHING: NDArray[np.int32] = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a process in a ring. `host` and `port` are the addresses where the first process waits for the others."""

    host: str
    port: int
    stage: int
    num_stages: int


class Store:
    """The meeting point of a ring, in the process of the first stage."""

    def __init__(self, host: str, num_stages: int) -> None:
        """`host`: the address of this machine by which the other processes reach it."""
        self._host, self._num_stages = host, num_stages
        self.store = _TCPStore(host, 0, num_stages, True, _JOIN, wait_for_workers=False)

    def place(self, stage: int) -> Place:
        return Place(self._host, self.store.port, stage, self._num_stages)


class Ring:
    """This process's two connections. `send` may be called from any thread."""

    def __init__(
        self,
        place: Place,
        address: str,
        device: torch.device,
        dtype: torch.dtype,
        hidden_size: int,
        store: Store | None = None,
    ) -> None:
        """Joins the ring. A process has at most one ring at a time.

        Args:
            address: of this process's machine.
            device: of this stage.
            dtype, hidden_size: of the hidden states.
            store: in the process of the first stage.
        Raises: DeviceLost if the others do not join.
        """
        _use_interface_of(address)
        self._device, self._dtype, self._hidden_size = device, dtype, hidden_size
        self.arrivals = Arrivals() if device.type == "cuda" else None
        self._number = 0  # of passes that have come
        self._coming: Arriving | None = None
        self._next, self._previous = (place.stage + 1) % place.num_stages, (place.stage - 1) % place.num_stages
        self.num_stages = place.num_stages
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock, self._ended = threading.Lock(), False
        self._threads: list[threading.Thread] = []
        self._on_message: Callable[[Received], None] = lambda _: None
        self._on_end: Callable[[EngineStopped | None], None] = lambda _: None
        self._place: Callable[[int], Tensor] = self._new_place
        try:
            kept = _TCPStore(place.host, place.port, place.num_stages, False, _JOIN) if store is None else store.store
            dist.init_process_group("gloo", store=kept, rank=place.stage, world_size=place.num_stages, timeout=_JOIN)
        except (RuntimeError, ValueError) as error:
            raise DeviceLost(f"{self._name(place.stage)} cannot join the others: {error}") from error

    def start(
        self,
        on_message: Callable[[Received], None],
        on_end: Callable[[EngineStopped | None], None],
        place: Callable[[int], Tensor] | None = None,
    ) -> None:
        """Starts the threads. They call `on_message` for every message in order, and `on_end` once.

        Args:
            on_message: called before the hidden states of the message have come.
            on_end: gets the error that has ended the ring, or None if the ring has ended in order.
            place: gives the memory for hidden states of n rows, before `on_message` is called. None allocates it.
        """
        self._on_message, self._on_end = on_message, on_end
        self._place = place or self._new_place
        for target in (self._send_all, self._receive_all):
            thread = threading.Thread(target=self._run, args=(target,), name=f"ring{target.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def send(self, message: Message) -> None:
        """Queues a message for the next stage."""
        self._outbox.put(message)

    def leave(self) -> None:
        """Closes this process's connections once its threads have ended."""
        for thread in self._threads:
            thread.join()
        dist.destroy_process_group()

    def _run(self, target: Callable[[], None]) -> None:
        begin_thread(self._device)
        target()

    def _send_all(self) -> None:
        try:
            kind = Kind.BEAT
            while kind not in (Kind.END, Kind.LOST):
                try:
                    message = self._outbox.get(timeout=_BEAT_S)
                except queue.Empty:
                    message = Message(Kind.BEAT, NOTHING)
                self._send(message)
                kind = message.kind
                del message  # the next message may be long in coming, and hidden states are large
        except Exception as error:
            self._lose(self._next, error)

    def _receive_all(self) -> None:
        try:
            while True:
                kind, about, num_rows = self._receive()
                if kind in (Kind.END, Kind.LOST):
                    self._end(DeviceLost(text_in(about)) if kind == Kind.LOST else None)
                    return
                if kind != Kind.BEAT:
                    self._deliver(kind, about, num_rows)
        except Exception as error:
            self._lose(self._previous, error)

    def _deliver(self, kind: Kind, about: NDArray[np.int32], num_rows: int) -> None:
        self._number += 1
        self._coming = Arriving(self._place(num_rows), self._number) if num_rows else None
        self._on_message(Received(kind, about, self._coming))
        if self._coming is not None:
            self._take(self._coming.rows)
        if self.arrivals is not None:
            self.arrivals.arrived(self._number)
        if self._coming is not None:
            self._coming.end()
            self._coming = None  # not sooner: to free pinned memory is a call of CUDA, see `engine/run/departures.py`

    def _send(self, message: Message) -> None:
        hidden = message.hidden
        num_rows = 0 if hidden is None else len(hidden.rows if isinstance(hidden, Leaving) else hidden)
        head = np.zeros(_HEAD, np.int32)
        head[:3] = message.kind, len(message.about), num_rows
        first, rest = message.about[: _HEAD - 3], message.about[_HEAD - 3 :]
        head[3 : 3 + len(first)] = first
        self._put(torch.from_numpy(head))
        if len(rest):
            self._put(torch.from_numpy(rest))
        if isinstance(hidden, Leaving):
            self._put(hidden.wait(SILENT_S))
            hidden.give_back()
        elif hidden is not None:
            self._put(hidden.contiguous())

    def _receive(self) -> tuple[Kind, NDArray[np.int32], int]:
        """The next message's kind, its `about`, and the number of rows of the hidden states that follow."""
        head = self._take(torch.empty(_HEAD, dtype=torch.int32)).numpy()
        kind, size, num_rows = head[:3].tolist()
        about = head[3 : 3 + size]
        if (rest := size - len(about)) > 0:
            about = np.concatenate((about, self._take(torch.empty(rest, dtype=torch.int32)).numpy()))
        return Kind(kind), about, num_rows

    def _put(self, tensor: Tensor) -> None:
        work = dist.isend(tensor, self._next)
        assert work is not None, "this process belongs to the group"
        work.wait(_SILENT)

    def _take(self, tensor: Tensor) -> Tensor:
        work = dist.irecv(tensor, self._previous)
        assert work is not None, "this process belongs to the group"
        work.wait(_SILENT)
        return tensor

    def _new_place(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, self._hidden_size, dtype=self._dtype, pin_memory=self._device.type == "cuda")

    def _lose(self, stage: int, error: Exception) -> None:
        self._end(DeviceLost(f"{self._name(stage)} is lost, so the model can no longer be computed: {error}"))

    def _end(self, error: EngineStopped | None) -> None:
        if (coming := self._coming) is not None:
            coming.end(error)
        with self._lock:
            if self._ended:
                return
            self._ended = True
        if error is not None:
            self.send(with_text(Kind.LOST, str(error)))
        try:
            self._on_end(error)  # first, because then the passes that a GPU waits for end
        finally:
            if self.arrivals is not None:
                self.arrivals.end()

    def _name(self, stage: int) -> str:
        return f"stage {stage + 1} of {self.num_stages}"


def _use_interface_of(address: str) -> None:
    """Makes gloo use the network interface that has this address. Otherwise it takes the one of the host's name."""
    found = (name for name, given in psutil.net_if_addrs().items() if any(each.address == address for each in given))
    if (interface := next(found, "lo" if address.startswith("127.") else None)) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def text_in(about: NDArray[np.int32]) -> str:
    """The text of a message."""
    return about.astype(np.uint8).tobytes().decode(errors="replace")


def with_text(kind: Kind, text: str) -> Message:
    return Message(kind, np.frombuffer(text.encode()[:4000], np.uint8).astype(np.int32))
