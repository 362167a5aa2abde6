"""Simulates the routing of streams over 1,000 different cards: ours beside round robin, power of two choices, and prefix only.

python -m loadtests.stream_routing

A card computes passes as the engine does: one token of each stream under way, then prompts up to the token budget, a quarter of
it for each prompt in turn. Its cache keeps whole pages and evicts the least recently used ones. A prompt waits until the
cache has pages for it and its answer. The rates are the planner's (`cluster/generation.py`).

Our policy is the gateway's router class, one object for each gateway. A request comes to a random gateway. A gateway knows its
own requests, the events of its own streams, and reports that are a second old. The other policies know the present state of every
card, which is an advantage for them.
"""

import heapq
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, count, repeat
from math import ceil, inf
from statistics import mean
from typing import Any

import torch

from cluster.catalogue import CATALOGUE
from cluster.generation import decode_tokens_per_s, prefill_tokens_per_s
from cluster.nodes import GIB, Card, Node
from cluster.prefixes import PAGE_TOKENS
from cluster.router import Heard, Report, Ticket
from cluster.stream_router import StreamLoad, choose_stream
from engine.run.kv_cache import bytes_per_token
from loadtests.report import write
from loadtests.traces import percentile

MODEL, DTYPE = "Qwen/Qwen3-8B", torch.bfloat16
# Cards, their number, and GiB of memory.
CARDS = {
    "NVIDIA GeForce RTX 4090": (400, 24.0),
    "NVIDIA GeForce RTX 5090": (300, 32.0),
    "NVIDIA L40S": (150, 45.0),
    "NVIDIA GB10": (100, 100.0),
    "NVIDIA H100": (50, 80.0),
}
MEMORY_SHARE, OTHER_GIB = 0.92, 1.5  # the planner's share of a card; workspace and CUDA graphs
WEIGHTS_BYTES = 16.4e9
BUDGET, QUANTUM = 8192, 2048  # most tokens of a pass, and of one prompt in a pass
LONGEST = 8192
GATEWAYS = 16
REPORT_S = 1.0
WARM_S, SECONDS = 90.0, 30.0
OBJECTIVE_S = 1.0  # a request is good if its first token comes within this time
LOADS = (0.8,)


@dataclass(slots=True)
class Job:
    """One stream."""

    at: float
    pages: list[int]  # the full pages of prompt and answer
    prompt: int
    answer: int
    most: int  # max_tokens
    session: "Session | None" = None
    gateway: int = 0
    first_at: float = inf
    held: int = 0  # the number of cached pages that it holds; its other pages are its own
    own: int = 0
    left: int = 0  # tokens of the prompt to compute
    cached: int = 0
    end: int = 0  # the card's step with the last token


class Session:
    """A chat. Each turn repeats the tokens of the turns before."""

    def __init__(self, rng: random.Random, system: list[int], length: int, turns: int) -> None:
        self.rng, self.length, self.turns = rng, length, turns
        self.pages = system[: length // PAGE_TOKENS]

    def turn(self, now: float) -> Job | None:
        prompt, answer = self.length + _drawn(self.rng, 60, 0.8, 1000), _drawn(self.rng, 350, 0.7, 1024)
        if not self.turns or prompt + answer > LONGEST:
            return None
        self.turns -= 1
        self.length = prompt + answer
        while len(self.pages) < self.length // PAGE_TOKENS:
            self.pages.append(self.rng.getrandbits(64))
        return Job(now, self.pages[: self.length // PAGE_TOKENS], prompt, answer, 1024, self, self.rng.randrange(GATEWAYS))


class Chat:
    """Chats of five turns on average behind system prompts of about 1,000 tokens. There is one system prompt for two cards."""

    name = "chat"

    def __init__(self, rng: random.Random, num_cards: int) -> None:
        self.rng, count = rng, num_cards // 2
        lengths = [_drawn(rng, 1000, 0.7, 4000) for _ in range(count)]
        self._systems = [(length, [rng.getrandbits(64) for _ in range(length // PAGE_TOKENS)]) for length in lengths]
        self._weights = list(accumulate(1 / (rank + 1) for rank in range(count)))

    def first(self, now: float) -> Job | None:
        (length, pages), turns = self.rng.choices(self._systems, cum_weights=self._weights)[0], 1
        while self.rng.random() < 0.8:
            turns += 1
        return Session(self.rng, pages, length, turns).turn(now)

    def think_s(self) -> float:
        return self.rng.expovariate(1 / 8)


class Rag:
    """Questions on documents of about 3,000 tokens, behind one instruction. There are five documents for each card."""

    name = "RAG"

    def __init__(self, rng: random.Random, num_cards: int) -> None:
        self.rng = rng
        instruction, count = [rng.getrandbits(64) for _ in range(2)], 5 * num_cards
        lengths = [2 * PAGE_TOKENS + _drawn(rng, 3000, 0.5, 7000) for _ in range(count)]
        self._documents = [(n, instruction + [rng.getrandbits(64) for _ in range(n // PAGE_TOKENS - 2)]) for n in lengths]
        self._weights = list(accumulate(1 / (rank + 1) for rank in range(count)))

    def first(self, now: float) -> Job | None:
        length, pages = self.rng.choices(self._documents, cum_weights=self._weights)[0]
        prompt, answer = length + _drawn(self.rng, 40, 0.5, 200), _drawn(self.rng, 250, 0.6, 1024)
        whole = pages + [self.rng.getrandbits(64) for _ in range((prompt + answer) // PAGE_TOKENS - len(pages))]
        return Job(now, whole, prompt, answer, 1024, None, self.rng.randrange(GATEWAYS))


def _drawn(rng: random.Random, median: float, sigma: float, most: int) -> int:
    return min(most, max(8, int(median * rng.lognormvariate(0.0, sigma))))


@dataclass(frozen=True, slots=True)
class Kind:
    """The speed and the cache of one kind of card."""

    name: str
    rate: float  # prompt tokens/s
    step_s: float  # of a decode step without streams
    stream_s: float  # seconds that each stream adds
    pages: int

    @classmethod
    def of(cls, name: str, gib: float) -> "Kind":
        config, node = CATALOGUE[MODEL], Node("n", "amd64", 256 * GIB, 16, (Card(name, int(gib * GIB)),))
        one, many = (streams / decode_tokens_per_s(config, DTYPE, node, streams, 1500) for streams in (1, 64))
        growth = (many - one) / 63
        free = MEMORY_SHARE * gib * GIB - WEIGHTS_BYTES - OTHER_GIB * GIB
        pages = int(free / bytes_per_token(config, DTYPE) / PAGE_TOKENS)
        return cls(name.removeprefix("NVIDIA "), prefill_tokens_per_s(config, DTYPE, node, 2000), one - growth, growth, pages)


class Replica:
    """One card: a queue of prompts, streams under way, and the cache. An event is the end of a pass, or of a run of steps."""

    def __init__(self, name: str, kind: Kind) -> None:
        self.name, self.kind = name, kind
        self.queue: deque[Job] = deque()  # jobs without pages
        self.active: deque[Job] = deque()  # jobs whose prompts are being computed
        self.running: list[tuple[int, int, Job]] = []  # a heap by the job's last step
        self.steps = 0
        self.version = 0  # the version of its event
        self._order = count()
        self._since, self._step_s = 0.0, 0.0  # the run of steps under way
        self._chunks: list[tuple[Job, int]] = []  # the pass under way
        self._is_passing = False
        # Cache.
        self._held: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._own = 0

    @property
    def num_open(self) -> int:
        return len(self.queue) + len(self.active) + len(self.running)

    @property
    def prompt_tokens(self) -> int:
        return sum(job.left for job in self.active) + sum(job.prompt for job in self.queue)

    @property
    def pages_held(self) -> int:
        return len(self._held) + self._own

    @property
    def is_idle(self) -> bool:
        return not (self._is_passing or self.running)

    def matched(self, job: Job) -> int:
        """The number of the prompt's pages in the cache."""
        most, found = (job.prompt - 1) // PAGE_TOKENS, 0
        while found < most and (job.pages[found] in self._held or job.pages[found] in self._kept):
            found += 1
        return found

    def next_event(self, now: float) -> float | None:
        """Starts a pass or a run of steps. Returns its end. None for an idle card."""
        kind = self.kind
        while self.queue and self._take_pages(self.queue[0]):
            self.active.append(self.queue.popleft())
        if self.active:
            room, self._chunks = BUDGET - len(self.running), []
            taken: dict[int, int] = {}
            turns = deque(self.active)
            while turns and room > 0:
                job = turns.popleft()
                chunk = min(QUANTUM, room, job.left - taken.get(id(job), 0))
                taken[id(job)] = taken.get(id(job), 0) + chunk
                room -= chunk
                if taken[id(job)] < job.left:
                    turns.append(job)
            self._chunks = [(job, taken[id(job)]) for job in self.active if id(job) in taken]
            self._is_passing = True
            return now + kind.stream_s * len(self.running) + max(kind.step_s, sum(taken.values()) / kind.rate)
        if not self.running:
            return None
        self._since, self._step_s = now, kind.step_s + kind.stream_s * len(self.running)
        return now + (self.running[0][0] - self.steps) * self._step_s

    def interrupt(self, now: float) -> float | None:
        """Called when a prompt comes. Returns the end of the step under way. None if a pass is under way: it ends first."""
        if self._is_passing:
            return None
        return self._since + max(1, ceil((now - self._since) / self._step_s)) * self._step_s

    def end(self, now: float) -> tuple[list[Job], list[Job]]:
        """The streams that got the first token, and those that got the last one."""
        first: list[Job] = []
        if self._is_passing:
            self._is_passing = False
            self.steps += 1
            for job, chunk in self._chunks:
                job.left -= chunk
                if not job.left:
                    first.append(job)
                    self.active.remove(job)
                    self._keep(job, job.prompt // PAGE_TOKENS)
                    job.end = self.steps + job.answer - 1
                    heapq.heappush(self.running, (job.end, next(self._order), job))
        else:
            self.steps += round((now - self._since) / self._step_s)
        last = []
        while self.running and self.running[0][0] <= self.steps:
            last.append(heapq.heappop(self.running)[2])
            self._release(last[-1])
        return first, last

    def _take_pages(self, job: Job) -> bool:
        matched = self.matched(job)
        need = ceil((job.prompt + job.answer) / PAGE_TOKENS) - matched
        unheld = sum(page not in self._held for page in job.pages[:matched])
        if len(self._held) + self._own + unheld + need > self.kind.pages:
            return False
        for page in job.pages[:matched]:
            self._hold(page)
        job.held, job.own, job.cached = matched, need, matched * PAGE_TOKENS
        job.left = job.prompt - job.cached
        self._own += need
        while len(self._held) + self._own + len(self._kept) > self.kind.pages:
            self._kept.popitem(last=False)
        return True

    def _hold(self, page: int) -> None:
        self._kept.pop(page, None)
        self._held[page] = self._held.get(page, 0) + 1

    def _keep(self, job: Job, num_pages: int) -> None:
        """Adds the stream's first pages to the cache. A page that equals a cached one stays the stream's own."""
        while job.held < num_pages and (page := job.pages[job.held]) not in self._held and page not in self._kept:
            self._held[page] = 1
            job.held += 1
            job.own -= 1
            self._own -= 1

    def _release(self, job: Job) -> None:
        self._keep(job, len(job.pages))
        self._own -= job.own
        for page in reversed(job.pages[: job.held]):
            self._held[page] -= 1
            if not self._held[page]:
                del self._held[page]
                self._kept[page] = None


class Policy:
    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas, self.rng = list(replicas), random.Random(0)

    def choose(self, job: Job, now: float) -> Replica:
        raise NotImplementedError

    def report(self, now: float) -> None: ...

    def begun(self, job: Job) -> None: ...

    def ended(self, job: Job, now: float) -> None: ...


class RoundRobin(Policy):
    name = "round robin"

    def __init__(self, replicas: Sequence[Replica]) -> None:
        super().__init__(replicas)
        self.rng.shuffle(self.replicas)
        self._turn = count()

    def choose(self, job: Job, now: float) -> Replica:
        return self.replicas[next(self._turn) % len(self.replicas)]


class PowerOfTwo(Policy):
    """Ray Serve's default: of two replicas drawn at random, the one with fewer requests."""

    name = "power of two"

    def choose(self, job: Job, now: float) -> Replica:
        return min(self.rng.sample(self.replicas, 2), key=lambda replica: replica.num_open)


class PrefixOnly(Policy):
    """The replica that first got the longest beginning of the prompt, independent of its load.

    A beginning of less than half of the prompt does not count. Such a prompt goes to the less loaded of two replicas.
    """

    name = "prefix only"

    def __init__(self, replicas: Sequence[Replica]) -> None:
        super().__init__(replicas)
        self._last: dict[int, Replica] = {}  # the last replica that had the page

    def choose(self, job: Job, now: float) -> Replica:
        depth = 0
        while depth < (job.prompt - 1) // PAGE_TOKENS and job.pages[depth] in self._last:
            depth += 1
        if 2 * depth * PAGE_TOKENS >= job.prompt:
            chosen = self._last[job.pages[depth - 1]]
        else:
            chosen = min(self.rng.sample(self.replicas, 2), key=lambda replica: replica.num_open)
        for page in job.pages:
            self._last.setdefault(page, chosen)
        return chosen


class Ours(Policy):
    """`cluster/stream_router.py`, as the gateways use it. One pool holds all cards: the router compares replicas, not pools."""

    name = "ours"

    def __init__(self, replicas: Sequence[Replica]) -> None:
        super().__init__(replicas)
        self._by_name = {replica.name: replica for replica in replicas}
        self._gateways = [StreamLoad("all", mean(replica.kind.rate for replica in replicas), Heard()) for _ in range(GATEWAYS)]
        self._open: dict[int, tuple[StreamLoad, Ticket]] = {}
        self._ids = count()

    def report(self, now: float) -> None:
        reports = {replica.name: self._report(replica, now) for replica in self.replicas}
        for pool in self._gateways:
            pool.update(reports, now)

    def _report(self, replica: Replica, now: float) -> Report:
        kind, streams = replica.kind, len(replica.running)
        return Report(
            now + 1,
            tokens_per_s=kind.rate,
            pass_s=kind.step_s,
            longest_input=min(LONGEST, kind.pages * PAGE_TOKENS),
            max_batch_tokens=BUDGET,
            pages_held=replica.pages_held,
            pages=kind.pages,
            prompt_tokens=replica.prompt_tokens,
            streams=streams,
            step_s=kind.step_s + streams * kind.stream_s,
            stream_s=kind.stream_s,
        )

    def choose(self, job: Job, now: float) -> Replica:
        num_tokens = job.prompt + job.most
        pages = tuple(job.pages[: job.prompt // PAGE_TOKENS])
        ticket = Ticket(next(self._ids), num_tokens, min(num_tokens, LONGEST), answer_tokens=job.most, pages=pages)
        chosen = choose_stream([self._gateways[job.gateway]], ticket, now)
        assert chosen is not None, "every card has enough pages"
        pool, name = chosen
        assert name is not None, "the pool has replicas"
        pool.opened(ticket)
        pool.routed(name, ticket)
        self._open[id(job)] = pool, ticket
        return self._by_name[name]

    def begun(self, job: Job) -> None:
        pool, ticket = self._open[id(job)]
        pool.begun(ticket, job.cached)

    def ended(self, job: Job, now: float) -> None:
        pool, ticket = self._open.pop(id(job))
        pool.answered(ticket, job.pages, job.answer)
        pool.finished(ticket, now)


def simulate(traffic: Chat | Rag, per_s: float, policy_of: type[Policy], kinds: dict[Kind, int]) -> list[Job]:
    """The requests that came after the warm-up. `per_s`: first requests of chats, or questions, per second."""
    replicas = [Replica(f"{kind.name} {index}", kind) for kind, number in kinds.items() for index in range(number)]
    policy, rng, order, until = policy_of(replicas), random.Random(1), count(), WARM_S + SECONDS
    events: list[tuple[float, int, Any, int]] = [(0.0, next(order), None, 0)]
    done: list[Job] = []

    def push(at: float, what: Any, version: int = 0) -> None:
        heapq.heappush(events, (at, next(order), what, version))

    def start(replica: Replica, now: float) -> None:
        replica.version += 1
        if (end := replica.next_event(now)) is not None:
            push(end, replica, replica.version)

    push(rng.expovariate(per_s), traffic)
    while events:
        now, _, what, version = heapq.heappop(events)
        if now > until:
            break
        if what is None:
            policy.report(now)
            push(now + REPORT_S, None)
        elif isinstance(what, Replica):
            if version != what.version:
                continue
            first, last = what.end(now)
            for job in first:
                job.first_at = now
                policy.begun(job)
            for job in last:
                policy.ended(job, now)
                if job.session is not None and (turn := job.session.turn(now)) is not None:
                    turn.at += traffic.think_s()
                    push(turn.at, turn)
            start(what, now)
        else:
            if what is traffic:
                push(now + rng.expovariate(per_s), traffic)
                what = traffic.first(now)
                if what is None:
                    continue
            if now >= WARM_S:
                done.append(what)
            replica = policy.choose(what, now)
            was_idle = replica.is_idle
            replica.queue.append(what)
            if was_idle:
                start(replica, now)
            elif (end := replica.interrupt(now)) is not None:
                replica.version += 1
                push(end, replica, replica.version)
    return done


def uncached_share(traffic: Chat | Rag, num_first: int) -> tuple[float, float, float, float]:
    """Statistics of consecutive requests.

    Returns: requests for each first request, and the means of prompt tokens, of prompt tokens that no earlier request had, and of
    answer tokens.
    """
    seen, prompts, new, answers = set[int](), list[int](), list[int](), list[int]()
    for _ in range(num_first):
        job = traffic.first(0.0)
        while job is not None:
            known = 0
            while known < len(job.pages) and job.pages[known] in seen:
                known += 1
            seen.update(job.pages)
            prompts.append(job.prompt)
            new.append(job.prompt - min(known * PAGE_TOKENS, job.prompt - 1))
            answers.append(job.answer)
            job = None if job.session is None else job.session.turn(0.0)
    half = len(new) // 2
    return len(new) / num_first, mean(prompts[half:]), mean(new[half:]), mean(answers[half:])


def capacity(kinds: dict[Kind, int], prompt: float, new: float, answer: float) -> float:
    """Requests/s if each page of a prompt is computed once in the whole cluster, and each card decodes as many streams as fit
    without shared pages."""
    total = 0.0
    for kind, number in kinds.items():
        streams = min(320, kind.pages / ((prompt + answer) / PAGE_TOKENS + 1))
        total += number / (new / kind.rate + answer * (kind.step_s / streams + kind.stream_s))
    return total


def figures(jobs: Sequence[Job]) -> dict[str, Any]:
    """The figures of the jobs. A job without a token at the end counts with its waiting time until then."""
    waits = [min(job.first_at, WARM_S + SECONDS) - job.at for job in jobs if job.at <= WARM_S + SECONDS]
    good = sum(job.first_at - job.at <= OBJECTIVE_S for job in jobs)
    begun = [job for job in jobs if job.first_at < inf]
    return {
        "p50 ms": 1e3 * percentile(waits, 50),
        "p99 ms": 1e3 * percentile(waits, 99),
        "good requests/s": good / SECONDS,
        "good %": 100 * good / len(waits),
        "cached %": 100 * sum(job.cached for job in begun) / max(1, sum(job.prompt for job in begun)),
    }


POLICIES: tuple[type[Policy], ...] = (RoundRobin, PowerOfTwo, PrefixOnly, Ours)


def table(traffic_of: type[Chat] | type[Rag], kinds: dict[Kind, int]) -> list[dict[str, Any]]:
    num_cards = sum(kinds.values())
    traffic = traffic_of(random.Random(0), num_cards)
    each, prompt, new, answer = uncached_share(traffic, 100 * num_cards)
    most = capacity(kinds, prompt, new, answer)
    rows: list[dict[str, Any]] = []
    for load in LOADS:
        others: list[dict[str, Any]] = []
        for policy in POLICIES:
            jobs = simulate(traffic_of(random.Random(0), num_cards), load * most / each, policy, kinds)
            row = {"load": f"{load:.0%}", "policy": policy.name, "requests/s": len(jobs) / SECONDS} | figures(jobs)
            if policy is Ours:
                row["p99 / best other"] = row["p99 ms"] / min(other["p99 ms"] for other in others)
                row["good / best other"] = row["good requests/s"] / max(other["good requests/s"] for other in others)
            others.append(row)
            rows.append(row)
            print(traffic.name, row, file=sys.stderr, flush=True)
    print(traffic.name, f"prompt {prompt:.0f}, new {new:.0f}, answer {answer:.0f}, capacity {most:.0f}/s", file=sys.stderr)
    return rows


def cluster(of: int = 1) -> dict[Kind, int]:
    """The cards, or one in `of` of them."""
    return {Kind.of(name, gib): number // of for name, (number, gib) in CARDS.items()}


def main() -> None:
    kinds, traffics = cluster(), (Chat, Rag)
    with ProcessPoolExecutor(len(traffics)) as workers:
        tables = dict(zip((each.name for each in traffics), workers.map(table, traffics, repeat(kinds)), strict=True))
    cards = "; ".join(
        f"{number} {kind.name}: {kind.rate:,.0f} prompt tokens/s, step {1e3 * kind.step_s:.1f} ms + {1e6 * kind.stream_s:.0f} us "
        f"a stream, {kind.pages} pages"
        for kind, number in kinds.items()
    )
    notes = [
        f"simulated, nothing ran on a GPU: {MODEL} in bf16 on {sum(kinds.values()):,} cards; {cards}",
        f"{WARM_S:.0f} s of warm-up with empty caches, then {SECONDS:.0f} s; Poisson arrivals; good: the first token within "
        f"{OBJECTIVE_S:g} s; a request without a token at the end counts as one that waited since it came",
        "load: of the requests/s that the cards could do if each page were computed once, and each card decoded as "
        "many streams as fit without shared pages",
        *(f"{each.name}: {str(each.__doc__).splitlines()[0]}" for each in traffics),
        f"{GATEWAYS} gateways, and each request comes to any of them; the turns of a chat, too",
        "round robin, power of two and prefix only know every card's state at once",
        "prefix only: " + " ".join(str(PrefixOnly.__doc__).split()),
        "a chat's next turn comes after its answer, so a policy that answers late gets fewer requests",
    ]
    write("stream_routing", "python -m loadtests.stream_routing", tables, notes)


if __name__ == "__main__":
    main()
