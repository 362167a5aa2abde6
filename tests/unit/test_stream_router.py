"""Routing of streams: arithmetic on plain data, with the test's clock."""

from typing import Any

import numpy as np
import pytest

from cluster.prefixes import PAGE_TOKENS, Prefixes, page_hashes
from cluster.router import SILENT_S, Heard, Report, Ticket
from cluster.stream_router import StreamLoad, choose_stream
from engine.run.kv_cache import PAGE_SIZE

DEFAULT = {"tokens_per_s": 10_000.0, "pages": 1000, "step_s": 0.01}


def pool(name: str = "p", heard: Heard | None = None, **reports: dict[str, Any]) -> StreamLoad:
    made = StreamLoad(name, 1000.0, heard or Heard())
    made.update({replica: Report(1.0, **(DEFAULT | report)) for replica, report in reports.items()}, now=0.0)
    return made


def prompt(seed: int, num_pages: int = 10) -> tuple[int, ...]:
    return page_hashes(np.random.default_rng(seed).integers(0, 1000, num_pages * PAGE_TOKENS, dtype=np.int32))


def ticket(number: int, pages: tuple[int, ...], answer: int = 100, batch: bool = False) -> Ticket:
    num_tokens = len(pages) * PAGE_TOKENS + 10 + answer
    return Ticket(number, num_tokens, num_tokens, batch, answer_tokens=answer, pages=pages)


def route(load: StreamLoad, each: Ticket, now: float = 0.0) -> str:
    chosen = choose_stream([load], each, now)
    assert chosen is not None
    assert chosen[1] is not None
    load.opened(each)
    load.routed(chosen[1], each)
    return chosen[1]


def test_the_rest_of_answers_does_not_wait() -> None:
    answering = {"queued_tokens": 500_300, "prompt_tokens": 300, "streams": 4}
    load = pool(a=answering, b={})
    assert load.waiting_tokens(0.0) == 300
    assert load.waiting_tokens(1.0) == 0  # computed since the report
    each = ticket(1, prompt(1), answer=10_000)
    route(load, each, now=1.0)
    assert load.waiting_tokens(1.0) == each.prompt_tokens
    load.begun(each, num_cached=0)
    assert load.waiting_tokens(1.0) == 0
    assert load.replicas["a"].report.waiting_tokens == 300
    assert Report(queued_tokens=7).waiting_tokens == 7


def test_a_hash_stands_for_the_whole_beginning() -> None:
    assert PAGE_TOKENS == PAGE_SIZE
    ids = np.arange(3 * PAGE_TOKENS + 5, dtype=np.int32)
    whole = page_hashes(ids)
    assert len(whole) == 3
    assert page_hashes(ids.astype(np.int64)[: 2 * PAGE_TOKENS]) == whole[:2]  # type: ignore[arg-type]
    ids[0] += 1
    assert not set(page_hashes(ids)) & set(whole)


def test_pages_are_held_without_a_gap_until_an_older_one_is_missed() -> None:
    prefixes, first, second = Prefixes(), prompt(1, 4), prompt(2, 4)
    prefixes.learn(first, "a")
    prefixes.learn(first[:2], "b")
    assert prefixes.held((*first, 5)) == {"a": 4, "b": 2}
    prefixes.learn(second, "a")
    prefixes.missed(first[0], "a", sent_at=0)  # the request was sent before the page was known, so its miss proves nothing
    assert prefixes.held(first)["a"] == 4
    prefixes.missed(first[0], "a", sent_at=prefixes.time)
    assert (prefixes.held(first), prefixes.held(second)) == ({"b": 2}, {"a": 4})
    prefixes.learn(first, "a")
    assert prefixes.held(first)["a"] == 4


def test_memory_is_bounded_and_the_latest_pages_stay() -> None:
    prefixes = Prefixes(most_pairs=20)
    for seed in range(10):
        prefixes.learn(prompt(seed), "a")
    assert [len(prefixes.held(prompt(seed))) for seed in range(10)] == [0] * 8 + [1, 1]


def test_the_first_token_waits_for_prompts_that_are_queued_and_not_for_what_is_cached() -> None:
    load = pool(a={}, b={"prompt_tokens": 20_000})
    each = ticket(1, prompt(1))
    assert load.finish_s(each, 0.0) == pytest.approx(1290 / 10_000 + 0.01)
    assert dict(zip(load.names, load.outlook(each, 0.0).first_s, strict=True))["b"] == pytest.approx(2.139)
    assert load.outlook(each, 1.5).first_s.max() == pytest.approx(0.639)  # b has computed 15,000 tokens since
    assert route(load, each) == "a"
    assert load.finish_s(ticket(2, prompt(2)), 0.0) == pytest.approx(2 * 0.129 + 0.01)
    load.begun(each, num_cached=0)
    assert load.finish_s(ticket(2, prompt(2)), 1.0) == pytest.approx(0.129 + 0.01)
    assert load.finish_s(ticket(3, prompt(1)), 1.0) == pytest.approx(10 / 10_000 + 0.01)


def serve(load: StreamLoad, each: Ticket, num_cached: int = 0) -> str:
    replica = route(load, each)
    load.begun(each, num_cached)
    load.answered(each, each.pages, 100)
    load.finished(each, 0.0)
    return replica


def test_a_stream_follows_its_prefix_until_the_queue_there_costs_more() -> None:
    load = pool(**{f"r{i}": {} for i in range(20)})
    home = serve(load, ticket(1, prompt(1)))
    assert {route(load, ticket(n, (*prompt(1), n)), 1.0) for n in range(2, 5)} == {home}
    load.update({home: Report(2.0, prompt_tokens=20_000, **DEFAULT), "other": Report(2.0, **DEFAULT)}, now=2.0)
    assert route(load, ticket(10, prompt(1)), 2.0) == "other"


def test_a_page_that_was_evicted_takes_all_older_ones_with_it() -> None:
    load = pool(a={})
    for number in (1, 2, 3):
        serve(load, ticket(number, prompt(number)))
    serve(load, ticket(4, prompt(2)), num_cached=128)
    cached = [load.finish_s(ticket(9, prompt(number)), 1.0) for number in (1, 2, 3)]
    assert cached == pytest.approx([0.139, 0.011, 0.011])


def test_gateways_that_know_nothing_of_each_other_send_a_new_prefix_to_one_replica() -> None:
    replicas: dict[str, dict[str, Any]] = {f"r{i}": {} for i in range(50)}
    chosen = [choose_stream([pool(**replicas)], ticket(1, (*prompt(seed), 0)), 0.0) for seed in range(40) for _ in range(2)]
    names = [each[1] for each in chosen if each is not None]
    assert names[::2] == names[1::2]
    assert len(set(names)) > 20
    busy = replicas | {str(names[0]): {"prompt_tokens": 50_000}}
    elsewhere = choose_stream([pool(**busy)], ticket(1, (*prompt(0), 0)), 0.0)
    assert elsewhere is not None
    assert elsewhere[1] != names[0]


def test_a_stream_goes_where_pages_are_free_and_waits_for_them_where_none_are() -> None:
    load = pool(full={"pages_held": 995, "streams": 5, "tokens_per_s": 90_000.0}, free={"pages_held": 900})
    assert route(load, ticket(1, prompt(1))) == "free"
    full = pool(full={"pages_held": 995, "streams": 5})
    wait_s = full.finish_s(ticket(1, prompt(1)), 0.0)
    assert wait_s is not None
    assert wait_s > pool(free={}).finish_s(ticket(1, prompt(1)), 0.0)  # type: ignore[operator]
    small = pool(small={"longest_input": 1000})
    assert choose_stream([small], ticket(1, prompt(1)), 0.0) is None


def test_decode_counts_where_first_tokens_come_equally_soon() -> None:
    slow, fast = pool("slow", s={"step_s": 0.05}), pool("fast", f={"step_s": 0.01})
    assert choose_stream([slow, fast], ticket(1, prompt(1, 1)), 0.0) == (fast, "f")
    crowd = pool("crowd", c={"streams": 60, "stream_s": 0.001})
    assert choose_stream([crowd, fast], ticket(1, prompt(1, 1)), 0.0) == (fast, "f")


def test_a_replica_that_failed_or_is_silent_is_taken_only_if_there_is_no_other() -> None:
    load = pool(a={}, b={})
    each = ticket(1, prompt(1))
    first = route(load, each)
    load.finished(each, 0.0, failed=True)
    assert {route(load, ticket(n, prompt(n)), 0.5) for n in range(2, 9)} == {"a", "b"} - {first}
    heard = Heard()
    silent = pool("silent", heard, s={})
    heard.at = heard.repeated_at = SILENT_S + 1
    chosen = choose_stream([silent], each, 0.0)
    assert chosen == (silent, None)


def test_an_interactive_stream_waits_for_one_pass_of_batch_work_at_most() -> None:
    load = pool(a={"prompt_tokens": 50_000, "batch_tokens": 50_000, "max_batch_tokens": 1000})
    assert load.finish_s(ticket(1, prompt(1)), 0.0) == pytest.approx(0.1 + 0.129 + 0.01)
    assert load.finish_s(ticket(1, prompt(1), batch=True), 0.0) == pytest.approx(5 + 0.129 + 0.01)


def test_what_is_over_counts_no_more() -> None:
    load = pool(a={})
    before = load.finish_s(ticket(1, prompt(1)), 0.0)
    for number in range(2, 6):
        each = ticket(number, prompt(number))
        route(load, each)
        if number % 2:
            load.begun(each, 0)
        load.finished(each, 0.0, failed=None)
        load.finished(each, 0.0, failed=None)
    assert load.finish_s(ticket(1, prompt(1)), 0.0) == before
