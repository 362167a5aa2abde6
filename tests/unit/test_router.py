"""Routing by predicted finish: arithmetic on plain data, with the test's clock."""

from dataclasses import asdict

import pytest

from cluster.autoscale import embedding_load, generation_load, needed
from cluster.ray_router import report_of
from cluster.router import COLD_START_S, SILENT_S, Heard, PoolLoad, Report, Ticket, choose, split


def pool(name: str, rate: float, replicas: int = 1, queued: int = 0, longest: int | None = None) -> PoolLoad:
    made = PoolLoad(name, rate)
    made.update({f"{name}{i}": Report(1.0, queued, rate, 0.001, longest) for i in range(replicas)}, now=0.0)
    return made


def send(load: PoolLoad, replica: str, each: Ticket) -> None:
    load.opened(each)
    load.routed(replica, each)


def ticket(num_tokens: int, longest: int = 10, number: int = 1) -> Ticket:
    return Ticket(number, num_tokens, longest)


def test_the_faster_pool_is_taken_until_its_queue_outweighs_it() -> None:
    fast, slow = pool("fast", 100_000), pool("slow", 50_000)
    taken = []
    for number in range(6):
        each = ticket(10_000, number=number)
        chosen = choose([fast, slow], each, now=0.0)
        assert chosen is not None
        send(chosen, chosen.ranked(each, 0.0)[0], each)
        taken.append(chosen.name)
    assert sorted(taken[:3]) == ["fast", "fast", "slow"]
    assert taken.count("fast") == 4


def test_what_has_no_replica_yet_counts_all_the_same() -> None:
    busy, free = pool("busy", 1_000), pool("free", 1_000)
    busy.opened(ticket(500))
    assert choose([busy, free], ticket(500, number=2), 0.0) is free
    assert busy.queued_tokens(0.0) == 500
    busy.routed("busy0", ticket(500))
    assert busy.queued_tokens(0.0) == 500
    busy.finished(ticket(500), 0.0)
    busy.routed("busy0", ticket(500))  # too late: its caller has left
    assert busy.queued_tokens(0.0) == 0


def test_a_request_sent_to_another_replica_counts_once() -> None:
    load = pool("a", 1_000, replicas=2)
    send(load, "a0", ticket(500))
    load.routed("a1", ticket(500))
    assert load.queued_tokens(0.0) == 500
    load.finished(ticket(500), 0.0, failed=True)
    assert load.ranked(ticket(1, number=2), 0.0) == ["a0", "a1"]  # the failure counts against a1


def test_what_is_over_counts_no_more() -> None:
    load = pool("a", 1_000)
    each = ticket(5_000)
    send(load, "a0", each)
    assert load.finish_s(ticket(0, number=2), 0.0) == pytest.approx(5.001)
    load.finished(each, now=0.0)
    assert load.finish_s(ticket(0, number=2), 0.0) == pytest.approx(0.001)


def test_other_gateways_requests_are_seen_in_reports_and_age() -> None:
    load = pool("a", 1_000, queued=3_000)
    assert load.finish_s(ticket(0), now=0.0) == pytest.approx(3.001)
    assert load.finish_s(ticket(0), now=2.0) == pytest.approx(1.001)
    assert load.finish_s(ticket(0), now=9.0) == pytest.approx(0.001)


def test_the_plans_rate_holds_until_one_is_measured() -> None:
    load = PoolLoad("a", 500)
    load.update({"r": Report(1.0)}, now=0.0)
    assert load.finish_s(ticket(1_000), 0.0) == pytest.approx(2.0)
    load.update({"r": Report(2.0, tokens_per_s=4_000)}, now=1.0)
    assert load.finish_s(ticket(1_000), 1.0) == pytest.approx(0.25)


def test_an_input_goes_only_where_it_fits() -> None:
    small, large = pool("small", 100_000, longest=8_192), pool("large", 1_000, longest=32_768)
    assert choose([small, large], ticket(9_000, longest=9_000), 0.0) is large
    assert choose([small, large], ticket(8_192, longest=8_192), 0.0) is small
    assert choose([small], ticket(9_000, longest=9_000), 0.0) is None
    assert small.ranked(ticket(9_000, longest=9_000), 0.0) == []


def test_a_replica_that_fails_fast_attracts_nothing() -> None:
    load = pool("a", 1_000, replicas=2)
    now = 0.0
    for number, shunned_s in enumerate((1, 2, 4, 8, 16, 30, 30)):
        each = ticket(10, number=number)
        send(load, "a0", each)
        load.finished(each, now, failed=True)
        assert load.ranked(ticket(1, number=99), now + shunned_s - 0.01) == ["a1", "a0"]
        assert load.ranked(ticket(1, number=99), now + shunned_s + 0.01) == ["a0", "a1"]
        now += shunned_s + 1
    each = ticket(10, number=50)
    send(load, "a0", each)
    load.finished(each, now)  # one success resets the count
    again = ticket(10, number=51)
    send(load, "a0", again)
    load.finished(again, now, failed=True)
    assert load.ranked(ticket(1, number=99), now + 1.01)[0] == "a0"


def test_failing_replicas_are_better_than_none() -> None:
    load = pool("a", 1_000)
    send(load, "a0", ticket(10))
    load.finished(ticket(10), 0.0, failed=True)
    assert load.ranked(ticket(1, number=2), 0.0) == ["a0"]
    assert choose([load], ticket(1, number=2), 0.0) is load
    other = pool("b", 1)
    assert choose([load, other], ticket(5, number=2), 0.0) is other


def test_a_pool_that_sleeps_costs_a_cold_start() -> None:
    asleep, awake = PoolLoad("asleep", 100_000), pool("awake", 1_000)
    assert choose([asleep, awake], ticket(1_000), 0.0) is awake
    assert choose([asleep, awake], ticket(int(1_000 * COLD_START_S) + 2_000), 0.0) is asleep


def test_replicas_that_are_gone_are_forgotten() -> None:
    load = pool("a", 1_000, replicas=2)
    send(load, "a0", ticket(500))
    assert not load.is_lost(ticket(500))
    load.update({"a1": Report(2.0)}, now=1.0)
    assert load.is_lost(ticket(500))
    assert load.ranked(ticket(1, number=2), 1.0) == ["a1"]
    load.finished(ticket(500), 1.0, failed=True)  # the replica of this request is no longer known
    assert load.ranked(ticket(1, number=2), 1.0) == ["a1"]


def test_a_replica_is_silent_only_while_others_are_heard() -> None:
    heard = Heard()
    quiet, other = PoolLoad("a", 1_000, heard=heard), PoolLoad("b", 10, heard=heard)
    quiet.update({"a0": Report(1.0)}, now=0.0)
    other.update({"b0": Report(1.0)}, now=0.0)
    send(quiet, "a0", ticket(1))
    assert not quiet.is_lost(ticket(1))  # no replica reports, so the controller is gone and no single replica counts as lost
    for seconds in (1, 2):  # a slow controller sends reports seldom
        other.update({"b0": Report(1.0 + seconds)}, now=SILENT_S + seconds)
        assert not quiet.is_lost(ticket(1))
    other.update({"b0": Report(4.0)}, now=SILENT_S + 3)
    assert quiet.is_lost(ticket(1))
    assert (len(quiet.heard), len(other.heard)) == (0, 1)
    assert choose([quiet, other], ticket(5, number=2), now=SILENT_S + 3) is other
    quiet.update({"a0": Report(1.0)}, now=SILENT_S + 3)  # an old report that comes again is no sign of life
    assert quiet.is_lost(ticket(1))
    quiet.update({"a0": Report(2.0)}, now=SILENT_S + 3)
    assert not quiet.is_lost(ticket(1))
    assert len(quiet.heard) == 1
    assert choose([quiet, other], ticket(5, number=2), now=SILENT_S + 3) is quiet


def test_a_request_is_split_only_where_that_is_sooner() -> None:
    even = [pool("a", 1_000), pool("b", 1_000)]
    parts = split(even, [100] * 20, 0.0)
    assert sorted(map(len, parts)) == [10, 10]
    assert sorted(index for part in parts for index in part) == list(range(20))
    assert split(even, [10] * 4, 0.0) == [[0, 1, 2, 3]]  # the request is short, so it is not divided
    assert split(even, [2_000], 0.0) == [[0]]
    assert split([pool("a", 1_000), pool("b", 50)], [100] * 20, 0.0) == [list(range(20))]  # the slow pool would end later
    thirds = split([pool("a", 2_000), pool("b", 1_000)], [100] * 30, 0.0)
    assert sorted(map(len, thirds)) == [10, 20]


def test_a_split_goes_over_the_replicas_of_one_pool_too() -> None:
    assert len(split([pool("a", 1_000, replicas=3)], [100] * 30, 0.0)) == 3


@pytest.mark.parametrize(
    ("busy", "backlog_s", "requests", "replicas"),
    [
        (0.0, 0.0, 0, 0),  # no requests: the pool sleeps if it may
        (0.0, 0.0, 1, 1),
        (0.7, 0.0, 3, 1),
        (0.9, 0.0, 3, 2),  # one replica at 90 % is too few
        (1.0, 8.0, 50, 4),
        (1.4, 0.0, 9, 2),  # two replicas at 70 % stay two
        (0.3, 0.0, 2, 1),
    ],
)
def test_replicas_follow_the_backlog(busy: float, backlog_s: float, requests: int, replicas: int) -> None:
    assert needed(embedding_load(busy, backlog_s), requests) == replicas


@pytest.mark.parametrize(
    ("kv_held", "backlog_s", "num_streams", "step_s", "stream_s", "replicas"),
    [
        (0.0, 0.0, 0, 0.0, 0.0, 0),
        (0.01, 0.0, 1, 0.004, 0.0, 1),  # one stream keeps the device busy, and one replica is enough
        (0.84, 0.0, 30, 0.01, 0.0002, 1),
        (0.95, 0.0, 30, 0.01, 0.0002, 2),  # the next stream would be preempted
        (0.2, 7.0, 5, 0.01, 0.0002, 2),  # prompts wait for 7 s
        (0.2, 0.0, 200, 0.06, 0.00025, 2),  # a step takes 10 ms with one stream and 60 ms with 200
        (0.2, 0.0, 150, 0.0475, 0.00025, 1),
        (0.2, 0.0, 3, 0.203, 0.001, 1),  # on a slow device one stream already takes 200 ms, so another replica would not help
        (0.2, 0.0, 300, 0.5, 0.001, 2),  # here the other streams take most of the time
    ],
)
def test_replicas_that_generate_follow_cache_prompts_and_inter_token_time(
    kv_held: float, backlog_s: float, num_streams: int, step_s: float, stream_s: float, replicas: int
) -> None:
    assert needed(generation_load(kv_held, backlog_s, num_streams, step_s, stream_s), num_streams) == replicas


def test_streams_spread_over_two_replicas_need_as_many_replicas_as_on_one() -> None:
    """Otherwise the number of replicas would go up and down."""
    one, half = generation_load(0.4, 0.0, 300, 0.01 + 299 * 0.0003, 0.0003), generation_load(0.2, 0.0, 150, 0.0547, 0.0003)
    assert needed(one, 300) == needed(2 * half, 300) == 3


def bulk(num_tokens: int, number: int = 7) -> Ticket:
    return Ticket(number, num_tokens, 10, batch=True)


def test_batch_work_holds_an_interactive_request_up_for_a_pass_at_most() -> None:
    load = PoolLoad("a", 1_000)
    load.update({"a0": Report(1.0, 9_000, 1_000, 0.0, batch_tokens=8_000, max_batch_tokens=500)}, now=0.0)
    assert load.finish_s(ticket(100), 0.0) == pytest.approx(1 + 0.5 + 0.1)
    assert load.finish_s(bulk(100), 0.0) == pytest.approx(9.1)
    assert load.queued_tokens(0.0) == 9_000
    assert load.finish_s(ticket(100), 1.2) == pytest.approx(0.5 + 0.1)  # interactive requests went first
    assert load.finish_s(ticket(100), 8.8) == pytest.approx(0.2 + 0.1)


def test_our_own_batch_requests_count_for_batch_requests_alone() -> None:
    busy, other = pool("busy", 1_000), pool("other", 1_000)
    send(busy, "busy0", bulk(50_000))
    busy.opened(bulk(50_000, number=8))
    send(other, "other0", ticket(2_000, number=9))
    assert choose([busy, other], ticket(10), 0.0) is busy
    assert choose([busy, other], bulk(10, number=2), 0.0) is other
    assert split([busy, other], [100] * 20, 0.0) == [list(range(20))]  # the other pool would not finish it sooner
    assert len(split([busy, pool("free", 1_000)], [100] * 20, 0.0)) == 2
    assert len(split([busy, pool("far", 1_000)], [100] * 20, 0.0, batch=True)) == 1
    for each in (bulk(50_000), bulk(50_000, number=8)):
        busy.finished(each, 0.0)
    assert busy.queued_tokens(0.0) == 0


def test_of_two_replicas_the_one_without_batch_work_is_taken() -> None:
    load = PoolLoad("a", 1_000)
    with_batch = Report(1.0, 8_000, 1_000, 0.0, batch_tokens=8_000, max_batch_tokens=500)
    load.update({"a0": with_batch, "a1": Report(1.0, 0, 1_000, 0.0, max_batch_tokens=500)}, now=0.0)
    assert load.ranked(ticket(10), 0.0) == ["a1", "a0"]
    send(load, "a1", ticket(600, number=2))
    assert load.ranked(ticket(10), 0.0) == ["a0", "a1"]


def test_a_request_that_is_opened_twice_counts_once() -> None:
    load, each = pool("a", 1_000), ticket(500)
    load.opened(each)
    load.opened(each)  # by the pool's client, and by the connection that sends the request alone
    assert load.queued_tokens(0.0) == 500
    load.finished(each, 0.0)
    assert load.queued_tokens(0.0) == 0


def test_a_report_of_a_newer_version_is_read() -> None:
    assert report_of(asdict(Report(1.0, 7)) | {"from_the_future": 1}) == Report(1.0, 7)
