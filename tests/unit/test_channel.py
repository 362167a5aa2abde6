"""Streams between a gateway and a replica: both ends of a channel in one event loop, and a model that a test drives by hand."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from math import inf
from time import monotonic, perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError

from cluster.router import Report, Ticket
from cluster.stream_router import StreamLoad
from engine.errors import BackendError, DeadlinePassed, EngineStopped, InvalidInput
from engine.options import SamplingOptions
from engine.schedule.request import Slice
from engine.schedule.stream import Answer, Stream, Token
from serve_app.admission.suspects import Death, Suspects, fingerprint
from serve_app.errors import Quarantined, Unhealthy
from serve_app.gateway import channel as gateway
from serve_app.gateway import connection
from serve_app.gateway.config import PoolRef
from serve_app.gateway.models import PooledGenerator
from serve_app.gateway.remote import LOST, NoReplica, ReplicaDied, Stopping
from serve_app.gateway.steps import NewStream, Steps
from serve_app.replica import channel as replica
from tests.unit.streams_by_hand import CONTEXT, EOS, VOCABULARY, Begun, ByHand, until


class Call:
    """A stand-in for the long call of Serve's handle."""

    def __init__(self, messages: AsyncGenerator[Steps]) -> None:
        self._messages = messages
        self.num_messages = 0
        self.error: Exception | None = None
        self.may_read = asyncio.Event()
        self.may_read.set()

    async def __anext__(self) -> Steps:
        await self.may_read.wait()
        if self.error is not None:
            raise self.error
        message = await anext(self._messages)
        self.num_messages += 1
        return message

    def cancel(self) -> None:
        self._closing = asyncio.ensure_future(self._messages.aclose())


class Link:
    """A gateway's channel to a replica, without Serve."""

    def __init__(self, model: Any = None) -> None:
        self.model = model or ByHand()
        self.channels = replica.Channels(self.model)
        self.calls: list[Call] = []
        self.changes: list[tuple[int, int]] = []  # streams begun, streams left
        self.is_heard, self.is_closed = True, False
        self.channel = gateway.Channel(self._steps, self._change, lambda: self.is_heard, self._on_close)

    def _on_close(self) -> None:
        self.is_closed = True

    def _steps(self, channel_id: str) -> Call:
        self.calls.append(Call(self.channels.steps(channel_id)))
        return self.calls[-1]

    async def _change(self, channel_id: str, begun: Sequence[NewStream], left: Sequence[int]) -> None:
        self.changes.append((len(begun), len(left)))
        await asyncio.sleep(0)
        self.channels.change(channel_id, begun, left)

    async def begin(self, *prompts: Sequence[int], **options: Any) -> "list[Begun]":
        """Returns when the replica has the streams."""
        first = len(self.model.streams)
        begun = [
            Begun(self.channel, prompt, SamplingOptions(**{"max_tokens": CONTEXT, "stop_ids": (EOS,), **options}))
            for prompt in prompts
        ]
        await until(lambda: len(self.model.streams) == first + len(prompts))
        return begun


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


def test_the_scores_of_a_prompt_arrive_with_its_first_token_or_its_end() -> None:
    async def scenario() -> None:
        link = Link()
        (scored,) = await link.begin([5, 6, 7], max_tokens=0, prompt_logprobs=1)
        (begun,) = await link.begin([5, 6, 7], prompt_logprobs=1, logprobs_of=(3,))
        scores = [Token(6, -0.5, ((4, -0.1),)), Token(7, -1.5, ((7, -1.5),))]
        for stream in link.model.streams:
            stream.first_scheduled_at = perf_counter()
            stream.accept_scores(Slice(stream, 0, 0, 3), scores)
        await scored.over
        assert scored.answer().prompt_tokens == (Token(5), *scores)
        assert (scored.answer().finish_reason, scored.heard) == ("length", [])
        token = Token(8, logprobs_of=(-2.5,))
        link.model.compute(token)
        await until(lambda: begun.heard == [token, "pass"])
        assert begun.stream.prompt_tokens == (Token(5), *scores)
        link.model.compute(EOS)
        await begun.over

    run(scenario)


def test_tokens_log_probabilities_and_ends_arrive() -> None:
    async def scenario() -> None:
        link = Link()
        first, second = await link.begin([1, 2], [3], logprobs=1)
        token = Token(7, -0.5, ((7, -0.5),))
        link.model.compute(token, 8)
        await until(lambda: len(second.heard) == 2)
        link.model.compute(EOS, 9)
        await first.over
        assert first.heard == [token, "pass"]
        assert first.answer() == Answer((token,), "stop", 2, 1, first.stream.queue_s, Token(EOS))
        link.model.compute(EOS)
        await second.over
        assert second.heard == [Token(8), "pass", Token(9), "pass"]
        assert second.stream.num_cached_tokens == 1
        assert second.stream.queue_s == pytest.approx(link.model.streams[1].queue_s)
        assert second.begun == [1]
        assert link.changes == [(2, 0)]  # one call began both streams

    run(scenario)


def test_the_replica_computes_with_the_gateway_s_seed_and_deadline() -> None:
    async def scenario() -> None:
        link = Link()
        stream = Stream.begin([1], SamplingOptions(max_tokens=5), VOCABULARY, CONTEXT)
        stream.priority, stream.deadline = "batch", perf_counter() + 30
        computing = asyncio.ensure_future(link.channel.compute(stream, lambda _: None))
        await until(lambda: bool(link.model.streams))
        (there,) = link.model.streams
        assert (there.seed, there.priority, there.options.max_tokens) == (stream.seed, "batch", 5)
        assert there.deadline == pytest.approx(stream.deadline, abs=1)
        assert link.channels.tokens_left == 5
        there.fail(DeadlinePassed("too late"))
        await computing
        with pytest.raises(DeadlinePassed, match="too late"):
            stream.future.result(0)

    run(scenario)


def test_tokens_that_come_while_a_message_is_under_way_join_the_next_one() -> None:
    async def scenario() -> None:
        link = Link()
        one, other = await link.begin([1], [2])
        (call,) = link.calls
        call.may_read.clear()
        link.model.compute(5, 6)
        await until(lambda: len(one.heard) == 2)
        assert call.num_messages == 1
        for step in range(10):
            link.model.compute(10 + step, 30 + step)
            await asyncio.sleep(0)
        link.model.compute(EOS, EOS)
        call.may_read.set()
        await asyncio.gather(one.over, other.over)
        assert call.num_messages == 2
        assert [token.id for token in one.answer().tokens] == [5, *range(10, 20)]
        assert [token.id for token in other.answer().tokens] == [6, *range(30, 40)]
        assert one.heard.count("pass") == 2

    run(scenario)


def test_a_caller_that_leaves_ends_its_stream_alone() -> None:
    async def scenario() -> None:
        link = Link()
        gone, stays = await link.begin([1], [2])
        link.model.compute(5, 6)
        await until(lambda: len(gone.heard) == 2)
        gone.stream.future.cancel()
        await gone.over
        await until(lambda: link.model.streams[0].future.cancelled())
        link.model.compute(7)
        await until(lambda: len(stays.heard) == 4)
        assert len(gone.heard) == 2
        assert link.changes == [(2, 0), (0, 1)]
        stays.stream.future.cancel()
        await stays.over

    run(scenario)


def test_streams_of_a_cohort_hear_their_tokens_in_one_call() -> None:
    """The tokens of a stream whose caller has just left are dropped."""

    async def scenario() -> None:
        link = Link()
        begun = await link.begin([1], [2], [3])
        for key, each in enumerate(begun):
            each.stream.key, each.stream.on_tokens = 10 + key, listen
        link.model.compute(5, 6, 7)
        there = link.model.streams
        assert {each.on_tokens for each in there} == {there[0].on_tokens}
        begun[1].stream.future.cancel()
        for number in (20, 30):
            there[0].on_tokens(np.array([each.key for each in there], np.int32), np.arange(number, number + 3, dtype=np.int32))
        there[0].on_pass()
        await until(lambda: len(begun[2].stream.answer) == 3)
        ids = [[token.id for token in begun[place].stream.answer] for place in (0, 2)]
        assert ids == [[5, 20, 30], [7, 22, 32]]
        assert heard == [([10, 12, 10, 12, 10, 12], [5, 7, 20, 22, 30, 32])]
        for each in begun:
            each.stream.future.cancel()
            await each.over

    def listen(keys: Any, token_ids: Any) -> None:
        heard.append((keys.tolist(), token_ids.tolist()))

    heard: list[tuple[list[int], list[int]]] = []
    run(scenario)


def test_a_caller_that_leaves_before_the_stream_is_sent_leaves_no_stream() -> None:
    async def scenario() -> None:
        link = Link()
        computing = [Begun(link.channel, [1], SamplingOptions(max_tokens=CONTEXT)) for _ in range(2)]
        await asyncio.sleep(0)  # the tasks begin; the first call follows in the loop's next round
        computing[0].stream.future.cancel()
        await until(lambda: len(link.model.streams) == 2 and link.model.streams[0].future.cancelled())
        assert not link.model.streams[1].future.done()
        computing[1].stream.future.cancel()
        await computing[1].over

    run(scenario)


def test_a_gateway_that_dies_takes_its_streams_with_it() -> None:
    async def scenario() -> None:
        link = Link()
        await link.begin([1], [2])
        link.model.compute(5, 6)
        reading = link.channel._reading
        reading.cancel()  # Serve cancels the call of a process that has ended
        await asyncio.wait([reading])
        await until(lambda: all(stream.future.cancelled() for stream in link.model.streams))
        assert link.channels._channels == {}

    run(scenario)


def test_a_channel_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway sent a stream, and died before its call for the tokens."""
    monkeypatch.setattr(replica, "UNREAD_S", 0.01)

    async def scenario() -> None:
        model = ByHand()
        channels = replica.Channels(model)
        new = NewStream(0, np.array([1]), SamplingOptions(max_tokens=CONTEXT), "interactive", 1e9, np.array([], dtype=np.int32))
        channels.change("its id", [new], [])
        await until(lambda: model.streams[0].future.cancelled())
        assert channels._channels == {}

    run(scenario)


def test_a_replica_that_dies_is_told_to_whoever_waits() -> None:
    async def scenario() -> None:
        link = Link()
        begun, other = await link.begin([1], [2])
        link.model.compute(5, 6)
        await until(lambda: len(other.heard) == 2)
        link.calls[0].error = RayActorError()
        link.model.compute(7, 8)  # these tokens still arrive; the next read fails
        for each in (begun, other):
            with pytest.raises(LOST):
                await each.over
        assert link.is_closed
        assert begun.stream.answer[0] == Token(5)
        assert not begun.stream.future.done()  # the router decides whether another replica continues the stream

    run(scenario)


def test_another_replica_goes_on_after_the_tokens_that_came() -> None:
    """The caller gets each token once. The prompt's scores and its number of cached tokens are those of the first replica."""

    async def scenario() -> None:
        dies, lives = Link(), Link()
        (begun,) = await dies.begin([5, 6, 7], max_tokens=4, prompt_logprobs=1, seed=3)
        scores = [Token(6, -0.5, ()), Token(7, -1.5, ())]
        dies.model.streams[0].accept_scores(Slice(dies.model.streams[0], 0, 0, 3), scores)
        dies.model.compute(10)
        await until(lambda: len(begun.stream.answer) == 1)
        dies.calls[0].error = RayActorError()
        dies.model.compute(11)  # the last token that arrives
        with pytest.raises(LOST):
            await begun.over
        going_on = asyncio.ensure_future(lives.channel.compute(begun.stream, lambda _: None))
        await until(lambda: bool(lives.model.streams))
        (there,) = lives.model.streams
        assert ([token.id for token in there.answer], there.seed, there.options.prompt_logprobs) == ([10, 11], 3, None)
        assert lives.channels.tokens_left == 2
        lives.model.compute(13)
        there.num_cached_tokens = 3  # another request has left these tokens in the cache
        lives.model.compute(14)
        await going_on
        assert [each for each in begun.heard if each != "pass"] == [Token(10), Token(11), Token(13), Token(14)]
        answer = begun.answer()
        assert (answer.finish_reason, answer.num_cached_tokens, begun.stream.num_cached_tokens) == ("length", 1, 1)
        assert answer.prompt_tokens == (Token(5), *scores)

    run(scenario)


def test_an_answer_whose_end_alone_is_lost_gets_its_end() -> None:
    async def scenario() -> None:
        link = Link()
        stream = Stream.begin([1], SamplingOptions(max_tokens=2), VOCABULARY, CONTEXT)
        stream.answer.extend([Token(5, -0.5), Token(6, -0.25)])
        await link.channel.compute(stream, lambda _: None)
        assert (stream.future.result(0).tokens, stream.future.result(0).finish_reason) == (tuple(stream.answer), "length")
        assert link.model.streams == []  # nothing is computed

    run(scenario)


def test_a_replica_that_falls_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that no longer reports but still sends messages, because it stops gracefully, is not lost."""
    monkeypatch.setattr(gateway, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(gateway, "SILENT_S", 0.5)

    async def scenario() -> None:
        link = Link()
        (begun,) = await link.begin([1])
        link.is_heard = False
        start = perf_counter()
        while perf_counter() < start + 0.7:
            link.model.compute(5) if len(link.model.streams[0].answer) < CONTEXT - 2 else None
            await asyncio.sleep(0.005)
        assert not begun.over.done()
        with pytest.raises(LOST):
            await begun.over

    run(scenario)


def test_an_idle_channel_ends_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(gateway, "IDLE_S", 0.02)
    monkeypatch.setattr(gateway, "SILENT_S", 0.02)

    async def scenario() -> None:
        link = Link()
        (begun,) = await link.begin([1])
        await asyncio.sleep(0.1)
        assert not link.is_closed  # a channel with a stream is not idle, even without tokens, and its replica reports
        link.model.compute(EOS)
        await begun.over
        await until(lambda: link.is_closed and not link.channels._channels)

    run(scenario)


@pytest.mark.parametrize("in_cohort", [False, True])
def test_a_gateway_that_reads_too_slowly_binds_bounded_memory(in_cohort: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "MOST_UNSENT", 12)

    async def scenario() -> None:
        link = Link()
        slow = await link.begin([1], [2])
        (call,) = link.calls
        call.may_read.clear()
        for step in range(9):  # the call that was under way takes the first two tokens
            first, other = link.model.streams
            if not first.future.done() and in_cohort:
                first.on_tokens(np.array([first.key, other.key], np.int32), np.full(2, step, np.int32))
                first.on_pass()
            elif not first.future.done():
                link.model.compute(step, step)
            await asyncio.sleep(0.002)
        assert all(stream.future.cancelled() for stream in link.model.streams)
        (channel,) = link.channels._channels.values()
        assert len(channel._unsent.numbers) == 0
        call.may_read.set()
        for each in slow:
            with pytest.raises(EngineStopped):
                await each.over

    run(scenario)


def test_a_gateway_that_leaves_a_message_unread_for_long_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        link = Link()
        (begun,) = await link.begin([1])
        link.calls[0].may_read.clear()
        link.model.compute(5)  # the call that is under way takes it
        await until(lambda: len(begun.heard) == 2)
        monkeypatch.setattr(replica, "UNREAD_S", 0.02)
        link.model.compute(6)  # this token waits
        await asyncio.sleep(0.05)
        assert not link.model.streams[0].future.cancelled()
        link.model.compute(7)
        await until(lambda: link.model.streams[0].future.cancelled())

    run(scenario)


@pytest.mark.parametrize(
    ("model", "prompt", "error", "text"),
    [
        (ByHand(), [VOCABULARY], InvalidInput, "the vocabulary ends at 99"),
        (ByHand(RuntimeError("a bug")), [1], BackendError, "the replica failed: RuntimeError"),
    ],
)
def test_a_stream_that_cannot_begin_hears_why(model: ByHand, prompt: list[int], error: type[Exception], text: str) -> None:
    async def scenario() -> None:
        link = Link(model)
        stream = Stream(np.array(prompt, dtype=np.int32), SamplingOptions(max_tokens=CONTEXT), 0)
        await link.channel.compute(stream, lambda _: None)
        with pytest.raises(error, match=text):
            stream.future.result(0)

    run(scenario)


def test_an_engine_that_has_stopped_is_a_replica_that_is_lost() -> None:
    async def scenario() -> None:
        link = Link(ByHand(EngineStopped("over")))
        with pytest.raises(LOST):
            await link.channel.compute(
                Stream.begin([1], SamplingOptions(max_tokens=CONTEXT), VOCABULARY, CONTEXT), lambda _: None
            )

    run(scenario)


class Pools(PooledGenerator):
    """A model in one pool. The test's list says what the pool does with each stream: tokens, then an error or the end."""

    def __init__(self, *outcomes: Sequence[Any]) -> None:
        load = StreamLoad("pool", 1000.0)
        load.update({"replica": Report(1.0)}, now=0.0)
        self._outcomes, self.attempts = list(outcomes), 0
        self.given, self._asleep = SimpleNamespace(spec=SimpleNamespace(name="it")), "wait"  # type: ignore[assignment]
        self._timeout_s, self.suspects = inf, Suspects()
        ref = SimpleNamespace(name="pool", min_replicas=1)
        self.pools = [SimpleNamespace(load=load, ref=ref, generate=self._on_a_replica, connection=None)]  # type: ignore[list-item]

    async def _on_a_replica(self, stream: Stream, _ticket: Any) -> None:
        self.attempts += 1
        for each in self._outcomes.pop(0):
            if isinstance(each, Exception):
                raise each
            stream.answer.append(Token(each))
        stream.future.set_result("the answer")


@pytest.mark.parametrize(
    ("outcomes", "attempts", "text"),
    [
        (([5],), 1, None),
        (([RayActorError()], [5]), 2, None),
        (([5, RayActorError()], [6]), 2, None),
        (([5, Stopping("it stops")], [6, Stopping("it, too")], [RayActorError()], [7]), 4, None),  # an update stops both
        (([5, RayActorError()], [6, EngineStopped("over")]), 2, "two replicas were lost, the last after 2 tokens"),
        (([EngineStopped("over")], [RayActorError()]), 2, "two attempts failed, because replicas died or could not be reached"),
        (([InvalidInput("bad")],), 1, "bad"),
    ],
)
def test_a_stream_goes_on_at_one_other_replica(outcomes: Sequence[Any], attempts: int, text: str | None) -> None:
    async def scenario() -> None:
        pools, stream = Pools(*outcomes), Stream.begin([1], SamplingOptions(max_tokens=CONTEXT), VOCABULARY, CONTEXT)
        pools.submit([stream])
        await until(stream.future.done)
        assert pools.attempts == attempts
        if text is None:
            assert stream.future.result(0) == "the answer"
        else:
            with pytest.raises((Unhealthy, InvalidInput), match=text):
                stream.future.result(0)

    run(scenario)


@pytest.mark.parametrize(
    ("num_tokens", "timeout_s", "ends"), [(0, 3600.0, []), (0, 0.0, ["TimeoutError()"]), (1, 3600.0, ["None"])]
)
def test_a_stream_without_a_token_says_something_about_its_version_only_at_the_timeout(
    num_tokens: int, timeout_s: float, ends: list[str]
) -> None:
    async def scenario() -> None:
        pools, stream, told = Pools(), Stream.begin([1], SamplingOptions(max_tokens=5), VOCABULARY, CONTEXT), list[str]()
        pools._timeout_s, pools.on_end = timeout_s, lambda _, error: told.append(repr(error))

        async def leave(stream: Stream, _ticket: Any) -> None:
            stream.answer.extend(Token(5) for _ in range(num_tokens))
            stream.future.cancel()

        pools.pools[0].generate = leave  # type: ignore[method-assign]
        await pools._generate(stream)
        assert told == ends

    run(scenario)


@pytest.mark.parametrize(("num_tokens", "is_suspect"), [(0, True), (15, True), (16, False)])
def test_a_stream_with_tokens_of_a_replica_becomes_no_suspect_by_its_death(num_tokens: int, is_suspect: bool) -> None:
    """Tokens of an earlier replica do not count."""

    async def scenario() -> None:
        dead = [ReplicaDied(name, RuntimeError("gone")) for name in ("a", "b")]
        pools = Pools([*[5] * 20, dead[0]], [*[6] * num_tokens, dead[1]])
        pools._untold = [Death(1, "another", 0.0)]  # so that nobody is told
        stream = Stream.begin([1], SamplingOptions(max_tokens=CONTEXT), VOCABULARY, CONTEXT)
        pools.submit([stream])
        await until(stream.future.done)
        assert pools.attempts == 2
        assert [death.replica for death in pools.suspects.deaths] == ["b"] * is_suspect
        with pytest.raises(Unhealthy, match=f"two replicas were lost, the last after {20 + num_tokens} tokens"):
            stream.future.result(0)

    run(scenario)


def test_a_suspect_is_refused_after_a_second_death_also_if_it_had_tokens() -> None:
    async def scenario() -> None:
        stream = Stream.begin([1], SamplingOptions(max_tokens=CONTEXT), VOCABULARY, CONTEXT)
        pools = Pools([*[5] * 20, ReplicaDied("b", RuntimeError("gone"))])
        pools._untold = [Death(1, "another", 0.0)]  # so that nobody is told
        pools.suspects.died(fingerprint("it", [stream.prompt]), "a")
        pools.submit([stream])
        await until(stream.future.done)
        with pytest.raises(Quarantined):
            stream.future.result(0)

    run(scenario)


def test_a_stream_does_not_wait_for_the_first_replica_of_a_pool_if_another_pool_has_one() -> None:
    async def scenario() -> None:
        lost, other = (
            connection.PoolConnection(PoolRef(name=name, node_class="cpu", tokens_per_s=1000.0)) for name in ("empty", "other")
        )
        lost._handle, lost.others = object(), [other.load]  # type: ignore[assignment]
        lost._woken_at = monotonic()  # so nothing wakes the pool now
        stream = Stream.begin([1], SamplingOptions(max_tokens=5), VOCABULARY, CONTEXT)
        waiting = asyncio.ensure_future(lost.generate(stream, Ticket(0, 10, 10)))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        other.load.update({"it": Report(1.0)}, now=monotonic())
        with pytest.raises(NoReplica, match="another pool has one"):  # so it does not count as a loss
            await asyncio.wait_for(waiting, 10)

    run(scenario)


@pytest.mark.slow
def test_a_replica_that_lost_a_stream_is_not_asked_again_before_it_is_known_to_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve lists a dead replica for seconds, and starts one with another name."""
    monkeypatch.setattr(connection, "_MOST_RESTART_S", 0.2)

    class Channel:
        async def compute(self, stream: Stream, _on_begun: Any) -> None:
            asked.append(stream)
            if len(asked) == 1:
                raise RayActorError
            stream.future.set_result("the answer")

    asked: list[Stream] = []
    pool = connection.PoolConnection(PoolRef(name="restarts", node_class="cpu", tokens_per_s=1000.0))
    pool._handle = object()  # type: ignore[assignment]
    monkeypatch.setattr(pool, "_open_channel", lambda *_: Channel())

    def compute(stream: Stream) -> Any:
        return pool.generate(stream, Ticket(0, 10, 10))

    async def scenario() -> None:
        first, second = (Stream.begin([1], SamplingOptions(max_tokens=5), VOCABULARY, CONTEXT) for _ in range(2))
        pool.load.update({"dead": Report(1.0)}, now=monotonic())
        with pytest.raises(RayActorError):
            await compute(first)
        pool.load.update({"dead": Report(2.0)}, now=monotonic())  # sent before the replica died
        first.answer.append(Token(5))
        with pytest.raises(LOST, match="had no replica for"):
            await compute(first)
        waiting = asyncio.ensure_future(compute(second))  # has no token, so the server's timeout limits its wait
        await asyncio.sleep(0.3)
        assert (len(asked), waiting.done()) == (1, False)
        pool.load.update({"dead": Report(2.0), "new": Report(1.0)}, now=monotonic())
        await waiting
        assert (asked, list(pool._channels)) == ([first, second], [("dead", False), ("new", False)])
        pool.load.update({"dead": Report(9.0)}, now=monotonic() + 5)  # the replica lives: only its network had failed
        await compute(first)

    run(scenario)
