"""A stream: one prompt, and the answer that grows by a token a pass. And the streams that a scheduler has under way.

A stream begins in the queue, where its prompt is taken in chunks. Each later pass computes one token: the last one that was
chosen. The keys and values of a stream's tokens lie in pages of the cache. Where no page is free, the stream that began last
gives its pages back and waits in the queue again; its prompt and its answer are then computed anew. Of several owners' streams it
is one of the owner that holds the most pages.

Where the device keeps the chosen tokens, a stream runs ahead: its next pass is launched before the host knows the token that the
pass computes. Such a token is foreseen. A stop id is then seen one pass late, and what that pass has chosen is dropped.

A stream whose next tokens are proposed (`engine/schedule/proposer.py`) speculates instead: a pass computes the last token and the
proposed ones, each as a slice of one token. The token that is chosen after a slice counts if all proposed tokens up to there were
right. So the answer is the same as without proposals.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from threading import RLock
from typing import Any, Literal, NamedTuple

import numpy as np

from engine.draws import Row, TokenCounts, banned_by_ngrams, uniform
from engine.errors import InvalidInput, NotFinite
from engine.options import SamplingOptions, TokenIds, check_sampling
from engine.schedule.cohort import Cohort, CohortPass, Listener
from engine.schedule.pages import Pages
from engine.schedule.piece import Piece, Scored, last_token_ids
from engine.schedule.proposer import Proposer
from engine.schedule.request import Slice, Waiting
from engine.text.grammar import Matcher
from engine.text.ids import checked_ids

FinishReason = Literal["stop", "length"]
NOT_FINITE = "the model gave logits that are not finite"
# Shorter answers do not speculate.
_LEAST_SPECULATING = 16
# Where passes have room for fewer proposed tokens of each stream, streams run ahead and do not speculate.
_LEAST_PROPOSED = 3
# A proposer that has not followed so many tokens of an answer, as while streams were many, begins anew.
_MOST_BEHIND = 64


class Token(NamedTuple):
    """One token of an answer, or of a prompt. `logprob` and `top` are None where nobody asked for them."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None  # (token id, log-probability) of the likeliest ones, the likeliest first
    logprobs_of: tuple[float, ...] = ()  # of the ids in `SamplingOptions.logprobs_of`, in their order


@lru_cache(1 << 16)
def token_of(token_id: int) -> Token:
    """A token that nothing else is known of. One object serves all streams."""
    return Token(token_id)


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a stream. `tokens` are without the one that ended it, which is `end`; None where the length ended it.

    `prompt_tokens` are there with `prompt_logprobs`. The first one has no log-probability.
    """

    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, found in the cache
    queue_s: float
    end: Token | None = None
    prompt_tokens: tuple[Token, ...] | None = None


@dataclass(eq=False, slots=True)
class Stream(Waiting):
    """One prompt to continue. `on_token` hears each token of the answer, in the thread that delivers; `future` the end.

    Where a cohort gets the tokens of a pass, `on_tokens` is called instead of `on_token`: once for all streams that share it,
    with the `key` and the token's id of each. `on_pass` is called in that thread after each pass that gave the stream a token:
    once for all streams that share it.
    """

    prompt: TokenIds
    options: SamplingOptions
    seed: int  # of the draws
    on_token: Callable[[Token], None] | None = None
    on_tokens: Listener | None = None
    key: int = -1
    on_pass: Callable[[], None] | None = None
    matcher: Matcher | None = None  # of a grammar
    speculates: bool = False  # whether a pass may verify several tokens
    # Progress, kept by the scheduler.
    scores: dict[int, Token] = field(default_factory=dict)  # tokens of the prompt that are scored, by position
    pages: list[int] = field(default_factory=list)
    proposer: Proposer | None = None  # once it was needed
    proposed: dict[int, int] = field(default_factory=dict)  # tokens that a pass under way verifies, by position
    num_kept: int = 0  # pages that later sequences can find
    num_cached_tokens: int = 0
    counts: TokenCounts | None = None  # for penalties
    cohort: Cohort | None = None  # that has the stream
    slot: int = 0  # of the stream in the cohort's columns
    joined_at: int = 0  # passes of the cohort that were scheduled before
    # The properties without an underscore, but for what passes of the cohort have changed.
    _answer: list[Token] = field(default_factory=list)
    _num_computed: int = 0
    _num_chosen: int = 0
    _num_foreseen: int = 0

    def __post_init__(self) -> None:
        self.counts = TokenCounts.wanted_by(self.options, self.prompt)

    @classmethod
    def begin(cls, prompt: Sequence[int] | TokenIds, options: SamplingOptions, vocab_size: int, context: int) -> "Stream":
        """A stream that ends with the context at the latest. `context` is the most tokens of prompt and answer together.

        Raises: InvalidInput for options out of range, ids without an embedding, and a prompt that fills the context.
        """
        check_sampling(options, vocab_size)
        ids = checked_ids(0, prompt, vocab_size).astype(np.int32)
        room = context - len(ids)
        if room < min(1, options.max_tokens):  # a prompt that is only scored may fill the context
            raise InvalidInput(f"the prompt has {len(ids)} tokens; the model's context is {context} tokens")
        options = replace(options, max_tokens=min(options.max_tokens, room))
        return cls(ids, options, random.getrandbits(63) if options.seed is None else options.seed)

    def go_on_after(self, token_ids: Sequence[int]) -> None:
        """Take these tokens for the beginning of the answer. Another engine has computed them from the same prompt and options.

        The stream then stands where preemption would leave it: the next pass computes prompt and answer, and chooses the next
        token. Seed, penalties, grammar, `min_tokens` and `max_tokens` count these tokens as generated. Tokens that complete the
        answer end the stream, and tokens that the grammar does not allow fail it. Call this before anything else.
        """
        self.num_chosen = len(token_ids)
        for token_id in token_ids:
            self.accept(Token(token_id))

    @property
    def answer(self) -> list[Token]:
        """The tokens that were delivered."""
        if self.cohort is not None:
            self.cohort.flush(self)
        return self._answer

    @property
    def num_answered(self) -> int:
        """The number of tokens in `answer`. Any thread may read it; it may lag by a pass."""
        cohort = self.cohort
        return len(self._answer) + (0 if cohort is None else cohort.num_logged(self))

    def add_to_answer(self, token_ids: Sequence[int]) -> None:
        """The cohort's tokens, of which nothing but the id is known."""
        self._answer += map(token_of, token_ids)

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values the cache has, or gets from a pass under way."""
        return self._num_computed + self._num_scheduled

    @num_computed.setter
    def num_computed(self, value: int) -> None:
        self._num_computed = value - self._num_scheduled

    @property
    def num_chosen(self) -> int:
        """Tokens of the answer that passes have chosen, those under way included."""
        return self._num_chosen + self._num_scheduled

    @num_chosen.setter
    def num_chosen(self, value: int) -> None:
        self._num_chosen = value - self._num_scheduled

    @property
    def num_foreseen(self) -> int:
        """Of the chosen tokens, those of passes under way."""
        return self._num_foreseen + self._num_under_way

    @num_foreseen.setter
    def num_foreseen(self, value: int) -> None:
        self._num_foreseen = value - self._num_under_way

    @property
    def _num_scheduled(self) -> int:
        """Passes of the cohort that have a token of the stream."""
        return 0 if self.cohort is None else self.cohort.num_scheduled - self.joined_at

    @property
    def _num_under_way(self) -> int:
        """Of them, those that are not delivered."""
        return 0 if self.cohort is None else self.cohort.num_scheduled - max(self.cohort.num_delivered, self.joined_at)

    def join(self, cohort: Cohort, slot: int) -> None:
        """The stream is in a cohort now, whose passes it counts."""
        assert self.cohort is None, "a stream is in one cohort at most"
        self.cohort, self.slot, self.joined_at = cohort, slot, cohort.num_scheduled

    def leave(self) -> None:
        """The stream is in no cohort any more."""
        self._num_foreseen, num_scheduled = self.num_foreseen, self._num_scheduled
        self._num_computed += num_scheduled
        self._num_chosen += num_scheduled
        self.cohort = None

    @property
    def just_goes_on(self) -> bool:
        """Whether nothing but the number in the answer changes for the choice of each further token."""
        options = self.options
        is_plain = options.logprobs is None and not (options.logprobs_of or options.logit_bias or options.allowed)
        return self.can_run_ahead and is_plain and (not options.stop_ids or self.num_chosen >= options.min_tokens)

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the answer."""
        return len(self.prompt) + len(self.answer)

    @property
    def prompt_tokens(self) -> tuple[Token, ...] | None:
        """The prompt's tokens and their log-probabilities. None where nobody asked, or not all are scored."""
        if self.options.prompt_logprobs is None or len(self.scores) < len(self.prompt) - 1:
            return None
        return Token(int(self.prompt[0])), *(self.scores[at] for at in range(1, len(self.prompt)))

    @property
    def _is_scored(self) -> bool:
        return self.options.prompt_logprobs is None or len(self.scores) == len(self.prompt) - 1

    @property
    def can_run_ahead(self) -> bool:
        """Whether the next token can be chosen before the host knows the last one."""
        return self.matcher is None and self.counts is None and not self.options.no_repeat_ngram

    def speculate(self) -> None:
        """Let passes verify several tokens where the next ones are predicted. Call this before anything else.

        A stream whose choices depend on the tokens before, by a grammar, a penalty or n-gram bans, does not.
        """
        self.speculates = self.can_run_ahead and self.options.max_tokens >= _LEAST_SPECULATING

    @property
    def is_predicted(self) -> bool:
        """Whether the last tokens were predicted, so that the stream is to wait for its token and speculate."""
        return self.speculates and bool(self.answer) and self._followed().is_trusted

    def _followed(self) -> Proposer:
        """The proposer, which knows all tokens of the answer. Called by the scheduler alone, and only while streams are few."""
        if self.proposer is None or self.proposer.num_tokens + _MOST_BEHIND < self.length:
            self.proposer = Proposer(self.ids)
        for token in self.answer[self.proposer.num_tokens - len(self.prompt) :]:
            self.proposer.add(token.id)
        return self.proposer

    @property
    def wants_more(self) -> bool:
        """Whether the answer may go on after the tokens that are foreseen."""
        return self.num_chosen < self.options.max_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.num_chosen - self.num_computed

    @property
    def num_inputs(self) -> int:
        return int(self.waiting_tokens > 0)

    @property
    def ids(self) -> TokenIds:
        """The prompt and the answer."""
        return np.concatenate((self.prompt, np.array([token.id for token in self.answer], dtype=np.int32)))

    def refusal(self) -> InvalidInput | None:
        if self.pool is None:
            return InvalidInput("this model does not generate")
        if not len(self.prompt):
            return InvalidInput("the prompt has no tokens")
        most, page_size = self.pool.num_pages * self.pool.page_size, self.pool.page_size
        if -(-(len(self.prompt) + self.options.max_tokens) // page_size) * page_size > most:
            return InvalidInput(
                f"the prompt has {len(self.prompt)} tokens and max_tokens is {self.options.max_tokens}; the cache holds {most}"
            )
        return None

    def _token_ids(self, start: int, stop: int, pages: Sequence[int]) -> TokenIds:
        """`pages`: the stream's own when the slice was scheduled. A caller that leaves meanwhile has given them back."""
        if start in self.proposed:
            return np.array([self.proposed[start]], np.int32)
        if stop <= len(self.prompt):
            return self.prompt[start:stop]
        if stop - start > 1:
            return self.ids[start:stop]
        assert self.pool is not None, "a stream is added to a scheduler first"
        index = start - len(self.prompt)
        if index < len(self.answer):
            return np.array([self.answer[index].id], np.int32)
        return last_token_ids(pages[(start - 1) // self.pool.page_size])

    def prepare(self, may_take_pages: bool) -> int | None:
        """Pages for all tokens, before the first of them is computed: those that the cache has, and fresh ones."""
        assert self.pool is not None, "a stream is added to a scheduler first"
        if self.pages:
            return 0
        if not may_take_pages:
            return None
        # A prompt is scored by the hidden state of each of its tokens, and the cache has none.
        shared = self.pool.match(self.ids) if self._is_scored else []
        fresh = self.pool.take(-(-self.length // self.pool.page_size) - len(shared))
        if fresh is None:
            self.pool.release(shared)
            return None
        self.pool.num_streams += 1
        self.pages = shared + fresh
        self.num_kept = len(shared)
        self.num_computed = len(shared) * self.pool.page_size
        self.num_cached_tokens = min(self.num_computed, len(self.prompt))
        return self.num_computed

    def next_slice(self, room: int, alone: bool) -> Slice | None:
        if room <= 0:
            return None
        assert self.cohort is None, "a cohort takes one slice for all of its streams"
        start, length = self._num_computed, len(self.prompt) + self._num_chosen
        self._num_computed = stop = min(start + room, length)
        if stop == length and self.options.max_tokens:
            self._num_chosen += 1
            self._num_foreseen += 1
        return Slice(self, 0, start, stop)

    def propose(self, most: int) -> list[Slice]:
        """Slices of up to `most` proposed tokens behind the slice that was just taken. They fit into the stream's pages."""
        if not self.is_predicted or self.num_foreseen > 1:  # of a pass under way: the last token is not known
            return []
        assert self.pool is not None, "a stream is added to a scheduler first"
        room = len(self.pages) * self.pool.page_size - self.num_computed
        tokens = self._followed().propose(min(most, room, self.options.max_tokens - self.num_chosen))
        self.proposed = dict(enumerate(tokens, start=self.num_computed))
        slices = [self.next_slice(1, alone=False) for _ in tokens]
        return [part for part in slices if part is not None]

    def settle(self) -> None:
        """No pass under way has a slice of the stream. What was computed of wrong proposals is computed anew."""
        if self.proposed:
            self.proposed = {}
            self.num_chosen, self.num_computed = len(self.answer), self.length - 1

    def piece(self, part: Slice) -> Piece | None:
        """As `Waiting.piece`. A grammar that allows no token ends the stream here.

        The mask may be computed twice for a token, as after preemption.
        """
        pages, index = tuple(self.pages), part.stop - len(self.prompt)  # the number in the answer of the token to choose
        if self.pool is None or len(pages) * self.pool.page_size < part.stop:
            return None
        row = None
        if part.stop >= self.length and self.options.max_tokens:
            banned = self.options.stop_ids if index < self.options.min_tokens else ()
            if self.options.no_repeat_ngram:
                banned = (*banned, *banned_by_ngrams(self.ids, self.options.no_repeat_ngram))
            allowed = None
            if self.matcher is not None:
                try:
                    allowed = self.matcher.allowed(banned)
                except InvalidInput as error:
                    self.fail(error)
                    return None
                if allowed is None:
                    self._end("stop")
                    return None
            draw = uniform(self.seed, index) if self.options.temperature else 0.0
            row = Row(self.options, draw, self.counts, banned, allowed)
        token_ids, is_proposed = self._token_ids(part.start, part.stop, pages), part.start in self.proposed
        return Piece(token_ids, part.start, pages, row, self._scored(part), is_proposed=is_proposed)

    def _scored(self, part: Slice) -> Scored | None:
        """What a pass scores of one slice. A stream that was preempted is scored once."""
        if self.options.prompt_logprobs is None or part.start >= len(self.prompt) or (self._is_scored and self.answer):
            return None
        return Scored(self.prompt[part.start + 1 : part.stop + 1], self.options.prompt_logprobs)

    def accept_scores(self, part: Slice, tokens: Sequence[Token]) -> None:
        """Keep the scored tokens of one slice. Ends the stream with its prompt if it wants no answer."""
        if self.future.done():
            return  # the caller has left
        self.scores |= enumerate(tokens, start=part.start + 1)
        if part.stop == len(self.prompt) and not self.options.max_tokens:
            self._end("length")

    def take(self, part: Slice, token: Token | None) -> bool:
        """Hear which token a pass has chosen after a slice; None where the logits are not finite.

        Returns: False, and nothing has changed, where the stream has ended or the slice follows a wrong proposal.
        """
        if self.future.done() or part.stop != self.length:
            return False
        if part.start in self.proposed and self.answer[-1].id != self.proposed[part.start]:
            return False
        if token is None:
            self.fail(NotFinite(NOT_FINITE))
        else:
            self.accept(token)
        return True

    def accept(self, token: Token) -> None:
        """Add the token that a pass has chosen. Ends the stream where the token, or the number of tokens, ends it."""
        if self.future.done():
            return  # the caller has left
        if token.id in self.options.stop_ids:
            return self._end("stop", token)
        self.answer.append(token)
        if self.counts is not None:
            self.counts.add(token.id)
        try:
            if self.matcher is not None:
                self.matcher.accept(token.id)
            if self.on_token is not None:
                self.on_token(token)
        except Exception as error:  # the grammar's limits, or the caller's own code
            return self.fail(error)
        if self.matcher is not None and self.matcher.is_over:
            self._end("stop")
        elif len(self.answer) >= self.options.max_tokens:
            self._end("length")

    def tell(self, token_id: int) -> None:
        """Tell the caller a token of the cohort. A caller whose code raises fails."""
        try:
            if self.on_token is not None:
                self.on_token(token_of(token_id))
        except Exception as error:
            self.fail(error)

    def _end(self, reason: FinishReason, token: Token | None = None) -> None:
        begun_at = self.first_scheduled_at
        queue_s = 0.0 if begun_at is None else begun_at - self.submitted_at  # None: `go_on_after` completed the answer
        counts = len(self.prompt), self.num_cached_tokens
        result = Answer(tuple(self.answer), reason, *counts, queue_s, token, self.prompt_tokens)
        with suppress(InvalidStateError):  # the caller has left
            self.future.set_result(result)

    def keep(self, part: Slice) -> None:
        """As `Waiting.keep`. A page that proposed tokens fill is kept with a later slice, when these tokens are verified."""
        if self.pool is None or not self.pages or part.stop > self.length:
            return
        num_full = part.stop // self.pool.page_size
        if num_full > self.num_kept:
            self.pool.keep(self.pages, self.ids[: part.stop])
            self.num_kept = num_full

    def keep_delivered(self) -> None:
        """As `keep`, of a stream of a cohort: each token of its answer but the last one is computed."""
        self.keep(Slice(self, 0, 0, self.length - 1))

    def give_back(self) -> None:
        """Release the pages. What was computed must be computed again."""
        if self.pool is None or not self.pages:
            return
        self.pool.release(self.pages)
        self.pool.num_streams -= 1
        self.pages, self.num_computed, self.num_kept = [], 0, 0


class Streams:
    """The streams whose prompts are computed. Hold the scheduler's lock to call anything here."""

    def __init__(
        self,
        pages: Pages,
        num_stages: int = 1,
        speculation_rows: int = 0,
        cohort_size: int = 0,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        """`num_stages`: as in `Scheduler`. The streams then form as many groups, of which each stage computes another.
        `speculation_rows`, `cohort_size`: as in `Runner`. `lock`: the scheduler's.
        """
        self.pages, self._num_stages, self._speculation_rows = pages, num_stages, speculation_rows
        self._most_proposed = 0  # tokens of each stream, in the pass that was scheduled last
        # Whose last token is not yet computed, and known or foreseen; in the order of their beginning.
        self._ready: dict[Stream, None] = {}
        # Those that can run ahead, by pass, the oldest first. They wait for the passes of the other groups: a pass that foresees
        # a token cannot begin before the pass that chooses it has ended.
        self._behind: deque[dict[Stream, None]] = deque()
        self._leaving: dict[Stream, None] = {}  # will give their pages up when the passes under way have ended
        self.cohort = Cohort(pages, cohort_size, lock or RLock())  # of those that are ready for every pass
        self._take_turns = False  # there are more than a pass takes

    def __len__(self) -> int:
        return len(self._ready) + sum(map(len, self._behind)) + len(self.cohort)

    def schedule(self, most: int, prompts_wait: bool = False) -> tuple[list[Slice], list[Stream]]:
        """A slice of one token for each stream, and the streams that gave up their pages for it, to be queued again.

        A stream that speculates gets further slices of a token each, where few streams are ready.

        Args:
            most: slices at most.
            prompts_wait: whether the pass has work without streams. A group is then left to a later pass, if this pass would
                have to wait for the pass before.
        """
        slices: list[Slice] = []
        preempted: list[Stream] = []
        self._take_turns = self.pages.num_streams > most
        if self._take_turns:
            self._dissolve()
        while self._behind and (len(self._behind) >= self._num_stages or not (self._ready or prompts_wait)):
            self._ready |= self._behind.popleft()
        if self._num_stages > 1:
            most = min(most, -(-self.pages.num_streams // self._num_stages))
        share = min(self._speculation_rows, most) // max(1, len(self._ready) + len(self.cohort)) - 1
        self._most_proposed = share if share >= _LEAST_PROPOSED else 0
        if self._most_proposed and any(stream.speculates for stream in self.cohort.streams):
            self._dissolve()
        if len(self.cohort):
            together, without_page = self.cohort.schedule()
            self._ready |= dict.fromkeys(without_page)
            if together is not None:
                slices.append(Slice(together, 0, 0, len(together)))
                most -= len(together) - 1
        for stream in tuple(self._ready):
            if len(slices) >= most:
                break
            if stream not in self._ready:  # it has given up its pages for one of the streams before it
                continue
            if stream.num_computed < len(stream.pages) * self.pages.page_size or self._take_page(stream, slices, preempted):
                del self._ready[stream]
                part = stream.next_slice(1, alone=False)
                assert part is not None, "one token always fits"
                slices.append(part)
                if self._most_proposed:
                    slices += stream.propose(self._most_proposed)
        return slices, preempted

    def run_ahead(self, slices: Sequence[Slice]) -> None:
        """The streams of these slices that can run ahead are ready for the pass after the one that is now scheduled."""
        ahead: dict[Stream, None] = {}
        for part in slices:
            stream = part.request
            if not isinstance(stream, Stream) or stream in self._leaving or (self._most_proposed and stream.is_predicted):
                continue
            if not (stream.num_foreseen and stream.can_run_ahead and stream.wants_more):
                continue
            if self._may_join(stream):
                self.cohort.add(stream)
            else:
                ahead[stream] = None
        if self._num_stages == 1:
            self._ready |= ahead
        elif ahead:
            self._behind.append(ahead)

    def _may_join(self, stream: Stream) -> bool:
        speculates = self._most_proposed and stream.speculates
        return len(self.cohort) < self.cohort.most and not self._take_turns and not speculates and stream.just_goes_on

    def _take_page(self, stream: Stream, slices: Sequence[Slice], preempted: list[Stream]) -> bool:
        """A page for the stream's next token, if need be of another stream (`_to_preempt`). False: there is none now.

        A stream in a pass under way, or in these slices, gives its pages up after the pass, because its token of that pass is not
        known yet.
        """
        while (page := self.pages.take(1)) is None:
            if self._leaving:
                return False
            last = self._to_preempt(slices)
            self._unready(last)
            if last.num_foreseen:
                self._leaving[last] = None
                return False
            last.give_back()
            preempted.append(last)
            if last is stream:
                return False
        stream.pages += page
        return True

    def _to_preempt(self, slices: Sequence[Slice]) -> Stream:
        """The last stream of the owner whose streams hold the most pages."""
        scheduled = [part.request for part in slices if not isinstance(part.request, CohortPass)]
        streams: list[Stream] = list(dict.fromkeys([*self.cohort.streams, *scheduled, *chain(*self._behind), *self._ready]))
        held = Counter[str]()
        for stream in streams:
            held[stream.owner] += len(stream.pages)
        owner = max(held, key=held.__getitem__)
        return next(stream for stream in reversed(streams) if stream.owner == owner)

    def advance(self, stream: Stream) -> bool:
        """A pass has ended, and the token that it chose for the stream was accepted.

        Returns: whether the stream has given up its pages, and is to be queued again.
        """
        stream.num_foreseen -= 1
        return self.arrived(stream)

    def arrived(self, stream: Stream) -> bool:
        """As `advance`, of a stream that has counted the token."""
        if stream.future.done() or stream.num_foreseen or stream.cohort is not None:
            return False
        stream.settle()
        if stream in self._leaving:
            del self._leaving[stream]
            stream.give_back()
            return True
        for streams in self._behind:  # the token is known, so nothing has to wait for its pass
            streams.pop(stream, None)
        self._ready.setdefault(stream)
        return False

    def forget(self, stream: Stream) -> None:
        """The stream has ended."""
        self._unready(stream)
        self._leaving.pop(stream, None)

    def _unready(self, stream: Stream) -> None:
        if stream.cohort is not None:
            self.cohort.remove(stream)
        for streams in (self._ready, *self._behind):
            streams.pop(stream, None)

    def _dissolve(self) -> None:
        """The streams of the cohort go on by themselves."""
        self._ready |= dict.fromkeys(self.cohort.dissolve())

    def abandoned(self, together: CohortPass) -> list[Slice]:
        """The pass is not to be launched as it is. Returns: its slices, one for each stream."""
        self.cohort.forget(together)
        self._dissolve()
        return [
            Slice(stream, 0, start, start + 1) for stream, start in zip(together.streams, together.starts.tolist(), strict=True)
        ]

    def drain(self) -> list[Stream]:
        """Take out all streams, to tell the callers that nobody will continue them."""
        streams = [*self.cohort.dissolve(), *chain(*self._behind), *self._ready, *self._leaving]
        self._ready.clear()
        self._behind.clear()
        self._leaving.clear()
        return streams
