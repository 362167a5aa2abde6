"""Requests that were in flight when replicas died: run alone, refused after two deaths, cleared by an answer."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.errors import DeviceLost
from engine.options import EmbedOptions, SamplingOptions, TokenIds
from engine.schedule.stream import Stream, Token
from engine.sequences import Sequences
from serve_app.admission import suspects as module
from serve_app.admission.qos import Qos
from serve_app.admission.suspects import Death, Suspects, fingerprint, innocence, settled
from serve_app.errors import Quarantined, Unhealthy
from serve_app.gateway import models
from serve_app.gateway.models import PooledModel
from serve_app.gateway.remote import Lost, ReplicaDied, Stopping, Unreachable
from serve_app.replica import journal as journals
from serve_app.replica.in_flight import InFlight
from serve_app.replica.journal import OtherJournals
from serve_app.replica.watched import WatchedGenerator
from tests.unit.streams_by_hand import ByHand, until

ROOT = Path(__file__).parents[2]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_fingerprint_is_of_the_model_and_the_ids() -> None:
    def arrays(*ids: list[int]) -> list[TokenIds]:
        return [np.array(each, dtype=np.int32) for each in ids]

    ids = arrays([1, 2, 3], [4])
    marks = [fingerprint("m", ids), fingerprint("n", ids), fingerprint("m", ids[:1]), fingerprint("m", [ids[0][::2]])]
    splits = [arrays([1, 2], [3, 4]), arrays([1], [2, 3, 4]), arrays([1, 2, 3, 4])]
    marks += [fingerprint("m", each) for each in splits]
    assert len(set(marks)) == len(marks)
    view, part = np.array([9, 4, 9], dtype=np.int32)[1:2], Sequences.of(arrays([5], [1, 2, 3], [4]))[1:]
    held = [ids, Sequences.of(ids), [ids[0], view], part]
    assert {fingerprint("m", each) for each in held} == {marks[0]}
    assert all(0 < mark < 1 << 64 for mark in marks)
    code = "import numpy as np; from serve_app.admission.suspects import fingerprint as f; a = np.int32; "
    code += "print(f('m', [np.array([1, 2, 3], a), np.array([4], a)]))"
    assert int(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)) == marks[0]


def test_the_death_of_a_replica_before_the_request_came_is_not_its_doing() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    sent_at = suspects.now()
    clock.now += 1
    assert suspects.died(7, "a", sent_at) is not None  # the request was at the replica when it died
    assert suspects.died(8, "a", sent_at) is not None
    clock.now += 1
    for replica in ("a", "b"):
        suspects.died(7, replica, sent_at)
    clock.now += 1
    for replica in ("a", "b"):  # the router sent the requests after the deaths, but did not know of the deaths yet
        assert suspects.died(8, replica, sent_at=suspects.now()) is None
        assert suspects.died(9, replica, sent_at=suspects.now()) is None
    with pytest.raises(Quarantined):
        suspects.check(7)
    suspects.check(8)
    suspects.check(9)
    assert 8 in suspects
    assert 9 not in suspects


@pytest.mark.parametrize(
    ("losses", "error"),
    [
        (["a", "b"], Quarantined),
        (["", ""], Unhealthy),  # the reason for the end of these replicas is unknown
        (["a", "known"], None),
        (["known", "gone", "gone", "a", "gone"], None),
        (["stops", "stops", "a"], None),  # an update stops one replica after the other
        (["gone", "a", "gone", "b"], Quarantined),
    ],
)
def test_a_request_is_sent_to_two_replicas_that_it_may_have_ended_at_the_most(
    losses: list[str], error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_AGAIN_S", 0.0)
    model, left, clock = PooledModel.__new__(PooledModel), list(losses), Clock()
    model.given, model.pools, model._untold = SimpleNamespace(spec=SimpleNamespace(name="m")), [], []  # type: ignore[assignment]
    model.suspects, model._open_tokens = Suspects(clock), Counter()
    model.suspects.died(99, "known")

    async def embed(*_: Any, **__: Any) -> str:
        clock.now += 1
        if not left:
            return "vectors"
        if (replica := left.pop(0)) == "gone":
            raise Unreachable("it is gone")
        if replica == "stops":
            raise Stopping("it stops")
        raise ReplicaDied(replica, RuntimeError("gone")) if replica else Lost("gone")

    model._choose = lambda *_: SimpleNamespace(embed=embed)  # type: ignore[method-assign, assignment, return-value]
    clock.now += 1
    asking = model._compute(7, Sequences.of([np.array([1], dtype=np.int32)]), EmbedOptions(), Qos())
    if error is None:
        assert asyncio.run(asking) == "vectors"
    else:
        with pytest.raises(error):
            asyncio.run(asking)
    assert not left


def test_a_request_that_reaches_no_replica_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_AGAIN_S", 0.001)
    monkeypatch.setattr(models, "_UNREACHABLE_S", 0.05)
    model = PooledModel.__new__(PooledModel)
    model.given, model.suspects = SimpleNamespace(spec=SimpleNamespace(name="m")), Suspects()  # type: ignore[assignment]
    model._open_tokens, attempts = Counter(), Counter[str]()

    async def embed(*_: Any, **__: Any) -> str:
        attempts["all"] += 1
        raise Unreachable("it is gone")

    model._choose = lambda *_: SimpleNamespace(embed=embed)  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(Unhealthy):
        asyncio.run(model._compute(7, Sequences.of([np.array([1], dtype=np.int32)]), EmbedOptions(), Qos()))
    assert attempts["all"] > 2
    assert not model._open_tokens


def test_two_deaths_are_refused_for_a_while() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    suspects.died(7, "a")
    suspects.died(7, "a")  # the same death is reported twice
    suspects.check(7)
    clock.now += 10
    suspects.died(7, "b")
    clock.now += 100
    with pytest.raises(Quarantined, match="two replicas of the model died, so it is refused for 500 s"):
        suspects.check(7)
    suspects.check(8)
    clock.now += 501
    assert suspects.deaths == []
    suspects.check(7)
    assert 7 not in suspects


def test_an_answer_clears_a_suspect_for_good() -> None:
    suspects = Suspects(Clock())

    async def answer() -> str:
        return "answer"

    suspects.learn([Death(7, "a", 1000.0)])
    assert asyncio.run(suspects.run(7, answer)) == "answer"
    assert 7 not in suspects
    suspects.learn([[7, "a", 1000.0]])  # another replica still reports it
    assert 7 not in suspects
    suspects.learn([Death(7, "b", 1000.0)])
    assert suspects.deaths == [Death(7, "b", 1000.0)]


def test_an_answer_clears_a_request_that_became_a_suspect_while_it_ran() -> None:
    """Equal requests are at two replicas. One replica dies, and the other one answers."""

    async def scenario() -> None:
        suspects, in_flight = Suspects(), InFlight(None, "b")
        go = asyncio.Event()

        async def work() -> None:
            await go.wait()

        async def alone() -> None:
            with in_flight.written([7, 8]):
                await go.wait()

        leave = in_flight.enter(9)
        running = [asyncio.ensure_future(each) for each in (suspects.run(7, work), in_flight.run(7, work), alone())]
        await asyncio.sleep(0)
        for each in (suspects, in_flight.suspects):
            each.learn([Death(mark, "a", each.now()) for mark in (7, 8, 9)])
        go.set()
        await asyncio.gather(*running)
        await asyncio.to_thread(leave, None)
        assert not in_flight.knows([7, 8, 9])
        assert [death.fingerprint for death in suspects.deaths] == [8, 9]
        assert in_flight.suspects.deaths == []
        in_flight.suspects.learn([Death(9, "a", in_flight.suspects.now())])  # another process reports it again
        assert in_flight.suspects.deaths == []

    asyncio.run(scenario())


def test_a_stream_that_has_proven_nothing_stays_a_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ALONE_S", 0.0)
    suspects, is_proven, proves = Suspects(), False, False

    async def work() -> None:
        nonlocal is_proven
        await asyncio.sleep(0)
        suspects.died(7, "a")
        is_proven = proves

    async def scenario() -> None:
        await suspects.run(7, work, lambda: is_proven)

    asyncio.run(scenario())
    assert 7 in suspects
    proves = True
    asyncio.run(scenario())
    assert 7 not in suspects


def test_a_suspect_stream_is_computed_once_and_alone() -> None:
    """Another stream of its replica is computed beside it, an equal one after it."""

    async def scenario() -> None:
        in_flight, hand = InFlight(None, "b"), ByHand()
        model = SimpleNamespace(info=SimpleNamespace(served_model_name="m"), new_stream=hand.new_stream, submit=hand.submit)
        model.tokenizer = model.prompts = model.generation = None
        watched = WatchedGenerator(model, in_flight)  # type: ignore[arg-type]
        first, other, equal = (Stream.begin([number], SamplingOptions(max_tokens=9), 100, 100) for number in (1, 2, 1))
        mark = fingerprint("m", [first.prompt])
        in_flight.suspects.died(mark, "a")
        watched.submit([first, other, equal])
        await until(lambda: len(hand.streams) == 2)
        hand.compute(5, 5)
        await asyncio.sleep(0.01)
        assert Counter(hand.streams) == Counter([first, other])
        for _ in range(8):
            hand.compute(5, 5)
        await until(lambda: len(hand.streams) == 3)
        assert hand.streams[2] is equal
        assert mark not in in_flight.suspects
        in_flight.suspects.learn([Death(fingerprint("m", [other.prompt]), name, module.time()) for name in "xy"])
        refused = Stream.begin([2], SamplingOptions(max_tokens=9), 100, 100)
        watched.submit([refused])
        await until(refused.future.done)
        assert isinstance(refused.future.exception(), Quarantined)
        assert len(hand.streams) == 3
        equal.fail(RuntimeError("over"))

    asyncio.run(scenario())


def test_suspects_run_one_at_a_time_and_others_beside_them() -> None:
    suspects, running, most = Suspects(), set[int](), list[set[int]]()
    suspects.learn(Death(mark, "a", module.time()) for mark in (1, 2, 3))

    async def scenario() -> None:
        async def work(mark: int) -> None:
            running.add(mark)
            await asyncio.sleep(0.02)
            most.append(set(running))
            running.remove(mark)

        await asyncio.gather(*(suspects.run(mark, lambda mark=mark: work(mark)) for mark in (1, 2, 3, 8, 9)))

    asyncio.run(scenario())
    assert all(len(each & {1, 2, 3}) <= 1 for each in most)
    assert any(len(each) == 3 for each in most)


def test_a_suspect_that_fails_again_is_refused_while_it_waits_in_line() -> None:
    suspects, asked = Suspects(), 0
    suspects.died(1, "a")

    async def scenario() -> list[Any]:
        async def kill() -> None:
            nonlocal asked
            asked += 1
            await asyncio.sleep(0)
            suspects.died(1, "b")
            raise RuntimeError("gone")

        return await asyncio.gather(*(suspects.run(1, kill) for _ in range(3)), return_exceptions=True)

    first, *others = asyncio.run(scenario())
    assert (asked, type(first), [type(each) for each in others]) == (1, RuntimeError, [Quarantined, Quarantined])


def test_a_suspect_whose_caller_leaves_stays_one() -> None:
    suspects = Suspects()
    suspects.died(1, "a")

    async def scenario() -> bool:
        began, cancelled = asyncio.Event(), False

        async def work() -> None:
            nonlocal cancelled
            began.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled = True
                raise

        task = asyncio.create_task(suspects.run(1, work))
        await began.wait()
        task.cancel()
        await asyncio.wait([task])
        return cancelled and task.cancelled()

    assert asyncio.run(scenario())
    assert 1 in suspects


def test_a_long_suspect_lets_the_next_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ALONE_S", 0.01)
    suspects = Suspects()
    suspects.died(1, "a")
    suspects.died(2, "a")

    async def scenario() -> None:
        end = asyncio.Event()

        async def set_end() -> None:
            end.set()

        async with asyncio.timeout(5):
            await asyncio.gather(suspects.run(1, end.wait), suspects.run(2, set_end))

    asyncio.run(scenario())


def stream() -> Stream:
    return Stream.begin([1], SamplingOptions(max_tokens=50), 100, 100)


def test_a_stream_proves_itself_by_its_answer_or_by_getting_on() -> None:
    fresh, continued = stream(), stream()
    continued.answer.extend([Token(1)] * 3)
    proofs = innocence(fresh), innocence(continued)
    for each in (fresh, continued):
        each.answer.extend([Token(1)] * 4)
    assert [each() for each in proofs] == [False, True]
    fresh.future.set_result("the answer")  # type: ignore[arg-type]
    assert proofs[0]()
    left = stream()
    left.future.cancel()
    assert not innocence(left)()


def test_the_refusal_travels_from_a_replica_to_a_gateway() -> None:
    error = pickle.loads(pickle.dumps(Quarantined(9)))
    assert (str(error), error.status) == (str(Quarantined(9)), 422)


DIE = """
import os, signal, sys, time
from pathlib import Path
from serve_app.replica.in_flight import InFlight
it = InFlight(Path(sys.argv[1]), "dead")
it.enter(5)(None)
it.enter(6)
it.enter(7)
it.enter(7)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def dying(tmp_path: Path) -> Any:
    process = subprocess.Popen([sys.executable, "-c", DIE, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.stdout.close()
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_journal_tells_what_was_in_flight_at_a_death(tmp_path: Path, dying: "subprocess.Popen[bytes]") -> None:
    own = InFlight(tmp_path, "own")
    own.look()
    assert not own.suspects.deaths
    os.kill(dying.pid, signal.SIGKILL)
    dying.wait()
    assert own.knows([6])  # `knows` finds a death without a new search for journals
    assert [death[:2] for death in own.suspects.deaths] == [(6, "dead"), (7, "dead")]
    later = InFlight(tmp_path, "later")
    later.look()
    assert [death[:2] for death in later.suspects.deaths] == [(6, "dead"), (7, "dead")]

    async def answer() -> None: ...

    later.suspects.died(8, "elsewhere")
    for mark in (8, 6):
        asyncio.run(later.run(mark, answer))
    last = InFlight(tmp_path, "last")
    last.look()
    assert [death[:2] for death in last.suspects.deaths] == [(7, "dead")]  # an answer has cleared 6


def test_a_replica_that_stops_in_order_leaves_no_journal(tmp_path: Path) -> None:
    stopped = InFlight(tmp_path, "stopped")
    stopped.enter(6)
    stopped.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_old_journals_are_removed(tmp_path: Path, dying: "subprocess.Popen[bytes]") -> None:
    os.kill(dying.pid, signal.SIGKILL)
    dying.wait()
    others = OtherJournals(tmp_path, "own")
    others.look()
    assert len(others.deaths()) == 2
    others.look()
    assert (tmp_path / "dead.journal").exists()
    os.utime(tmp_path / "dead.journal", (1, 1))
    others.look()
    assert not (tmp_path / "dead.journal").exists()


def marks_of(in_flight: InFlight) -> list[int]:
    return sorted({each for each in in_flight._journal._slots if each})


def test_a_lost_device_and_a_client_that_leaves_stay_in_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight = InFlight(None, "own")

    def fail(error: BaseException) -> Callable[[], Any]:
        async def work() -> None:
            raise error

        return work

    for mark, error in ((1, DeviceLost("gone")), (2, asyncio.CancelledError()), (3, ValueError("bad"))):
        with pytest.raises(type(error)):
            asyncio.run(in_flight.run(mark, fail(error)))
    assert marks_of(in_flight) == [1, 2]
    monkeypatch.setattr("serve_app.replica.in_flight.monotonic", lambda: 1e12)
    in_flight.look()
    assert marks_of(in_flight) == [1]


def test_a_stream_with_some_tokens_leaves_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight, streams = InFlight(None, "own"), [stream() for _ in range(3)]
    now = 0.0
    monkeypatch.setattr("serve_app.replica.in_flight.monotonic", lambda: now)
    in_flight.look()
    streams[0].answer.append(Token(1))  # a token of an earlier replica

    async def work() -> None:
        nonlocal now
        streams[2].answer.extend([Token(1)] * 16)
        in_flight.suspects.died(3, "another")
        now = 8.0
        in_flight.look()
        assert marks_of(in_flight) == [1, 3]
        in_flight.suspects.clear(3)
        now = 10.0
        in_flight.look()
        assert marks_of(in_flight) == [1]

    leave = [in_flight.enter(mark, settled(each)) for mark, each in zip((1, 2), streams, strict=False)]
    for each in streams[:2]:
        each.answer.extend([Token(1)] * 15)
    now = 2.0
    in_flight.look()
    assert marks_of(in_flight) == [1, 2]
    streams[1].answer.append(Token(1))
    now = 4.0
    in_flight.look()
    assert marks_of(in_flight) == [1]
    now = 6.0
    asyncio.run(in_flight.run(3, work, innocence(streams[2]), settled(streams[2])))
    leave[1](DeviceLost("gone"))
    leave[0](None)
    assert marks_of(in_flight) == []
    assert sorted(in_flight._journal._free) == list(range(journals._SLOTS))


def test_a_full_journal_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "_SLOTS", 2)
    journal = journals.Journal(None)
    slots = journal.enter([1, 2, 3])
    assert len(slots) == 2
    journal.leave(slots)
    assert len(journal.enter([4])) == 1
