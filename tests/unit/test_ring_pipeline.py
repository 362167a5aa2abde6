"""The messages between the processes of a pipeline, and a pass that one of them fails to compute. No process is started."""

from collections.abc import Callable
from threading import Semaphore
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import BackendError, DeviceLost
from engine.run.arrivals import Arriving
from engine.run.layers import Layers
from engine.run.pack import BatchPacker
from engine.run.ring import NOTHING, Kind, Message, Received, Ring, text_in, with_text
from engine.run.ring_pipeline import RingPipeline
from engine.run.work import Work, read, written
from engine.schedule.piece import Piece

PACKER = BatchPacker("last_token", 4, None)
CPU = torch.device("cpu")


class FakeRing:
    """Stands in for the later stages. The test gives their messages to `arrive`."""

    num_stages = 2

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self._sent = Semaphore(0)

    def start(self, on_message: Callable[[Received], None], on_end: Callable[[Any], None]) -> None:
        self.arrive, self.end = on_message, on_end

    def send(self, message: Message) -> None:
        self.sent.append(message)
        self._sent.release()

    def wait_for(self, count: int) -> None:
        """Returns when `count` further messages have been sent."""
        for _ in range(count):
            assert self._sent.acquire(timeout=30)

    def leave(self) -> None: ...


class FirstLayers:
    """A model whose hidden states are the tokens' ids."""

    shares_prefixes = False

    def forward(self, batch: Any, pooled_only: bool = False) -> torch.Tensor:
        assert not pooled_only, "only the last stage gives pooled rows"
        return batch.token_ids.float().unsqueeze(1).expand(-1, 4)


def pipeline(ring: FakeRing) -> RingPipeline:
    network: Any = SimpleNamespace(
        model=FirstLayers(),
        vector_head=SimpleNamespace(reads_pooled_rows=True),
        heads=lambda names: (),
        finish_batch=lambda hidden, batch, heads: (hidden, []),
    )
    layers = Layers(network.model, PACKER, CPU, None)
    return RingPipeline(network, PACKER, layers, CPU, ring)  # type: ignore[arg-type]


def ids(*values: int) -> Any:
    return np.array(values, np.int32)


@pytest.mark.parametrize("size", [0, 5, 1021, 1022, 5000])
@pytest.mark.parametrize("num_rows", [0, 7])
def test_a_message_of_any_size_arrives(size: int, num_rows: int) -> None:
    """The first transfer has a fixed size, and the rest of a long message follows."""
    sent: list[torch.Tensor] = []
    sender, receiver = object.__new__(Ring), object.__new__(Ring)
    sender._put = sent.append  # type: ignore[method-assign]
    receiver._take = lambda tensor: tensor.copy_(sent.pop(0))  # type: ignore[method-assign]
    receiver._device, receiver._dtype, receiver._hidden_size = CPU, torch.float32, 4
    receiver._place, receiver._number, receiver.arrivals = receiver._new_place, 0, None
    seen: list[tuple[Received, bool]] = []
    receiver._on_message = lambda received: seen.append((received, bool(sent)))
    hidden = torch.randn(num_rows, 4) if num_rows else None
    sender._send(Message(Kind.PASS, np.arange(size, dtype=np.int32), hidden))
    receiver._deliver(*receiver._receive())
    assert not sent
    ((found, came_before),) = seen
    assert (found.kind, found.about.tolist()) == (Kind.PASS, list(range(size)))
    assert came_before == (hidden is not None), "a message comes before its hidden states"
    assert (found.hidden is None) == (hidden is None)
    if hidden is not None and found.hidden is not None:
        assert torch.equal(found.hidden.wait(), hidden)


def test_a_pass_arrives_as_it_was_sent() -> None:
    pieces = [Piece(ids(5, 6, 7), 0, (3,), None), Piece(ids(-4), 128, (1, 9), None)]
    found = read(written(Work(pieces, all_rows=True)))
    assert [(len(each.token_ids), each.start, each.pages) for each in found.pieces] == [(3, 0, (3,)), (1, 128, (1, 9))]
    assert (found.all_rows, list(found.sequences)) == (True, [])
    texts = read(written(Work((), [ids(5, 6), ids(7), ids(8, 9, 10)], whole=False)))
    assert [each.tolist() for each in texts.sequences] == [[5, 6], [7], [8, 9, 10]]
    assert (texts.whole, texts.all_rows, list(texts.pieces)) == (False, False, [])
    assert text_in(with_text(Kind.FAILED, "kein Platz für 3 Tokens").about) == "kein Platz für 3 Tokens"


def test_a_pass_that_fails_elsewhere_fails_alone() -> None:
    ring = FakeRing()
    runner = pipeline(ring)
    flights = [runner.launch([ids(5, 6)]), runner.launch([ids(7)])]
    ring.wait_for(2)
    ring.arrive(Received(*with_text(Kind.FAILED, "the second stage broke")[:2]))
    hidden = Arriving(torch.ones(1, 4), 2)
    ring.arrive(Received(Kind.PASS, NOTHING, hidden))
    assert not flights[1].done
    hidden.end()
    with pytest.raises(BackendError, match="the second stage broke"):
        flights[0].wait()
    np.testing.assert_array_equal(flights[1].wait().vectors, np.ones((1, 4)))
    assert ring.sent[0].hidden is not None
    assert ring.sent[0].hidden[:, 0].tolist() == [5, 6]


def test_all_passes_hear_of_a_lost_stage() -> None:
    ring, heard = FakeRing(), list[Any]()
    runner = pipeline(ring)
    runner.on_lost = heard.append
    flights = [runner.launch([ids(5, 6)]), runner.launch([ids(7)])]
    ring.wait_for(2)
    lost = DeviceLost("stage 2 of 2 is lost")
    ring.end(lost)
    for flight in (*flights, runner.launch([ids(8)])):
        with pytest.raises(DeviceLost, match="stage 2 of 2 is lost"):
            flight.wait()
    runner.close()
    assert heard == [lost]
