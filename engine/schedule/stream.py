"""`Stream`: one prompt and its answer, which grows by a token in each pass.

A stream begins in the queue, and passes take its prompt in chunks. Each later pass computes the last chosen token. The keys and
values of a stream's tokens are in pages of the cache. If no page is free, a stream is preempted: it gives its pages back and
waits in the queue again, and later passes compute its prompt and its answer again.

A stream runs ahead if the device keeps the chosen tokens: its next pass is launched before the host knows the token that the
pass computes. Such a token is foreseen. The host sees a stop id one pass late, and drops the token that this pass has chosen.

A stream with proposed tokens (`engine/schedule/proposer.py`) speculates instead: a pass computes the last token and the proposed
tokens, each as a slice of one token. The token chosen after a slice counts if all proposed tokens up to this slice were right. So
the answer is the same as without proposals.
"""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from engine.draws import Row, TokenCounts, banned_by_ngrams, uniform
from engine.errors import InvalidInput, NotFinite
from engine.options import SamplingOptions, TokenIds, check_sampling
from engine.schedule.cohort import Cohort, Listener
from engine.schedule.piece import Piece, Scored, last_token_ids
from engine.schedule.proposer import TRUSTED_FROM, Proposer
from engine.schedule.request import Slice, Waiting
from engine.text.grammar import Matcher
from engine.text.ids import checked_ids

FinishReason = Literal["stop", "length"]
NOT_FINITE = "the model gave logits that are not finite"
# Shorter answers do not speculate.
_LEAST_SPECULATING = 16
# A proposer is not called while there are many streams. If it has missed more tokens than this, a new one is made.
_MOST_BEHIND = 64


class Token(NamedTuple):
    """One token of an answer, or of a prompt. `logprob` and `top` are None unless the options ask for them."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None  # (token id, log-probability) of the likeliest tokens, likeliest first
    logprobs_of: tuple[float, ...] = ()  # log-probabilities of the ids in `SamplingOptions.logprobs_of`, in the same order


@lru_cache(1 << 16)
def token_of(token_id: int) -> Token:
    """A token without log-probabilities. All streams share the object."""
    return Token(token_id)


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a stream. `end` is the stop token, which is not in `tokens`; None if the stream ended without one.

    `prompt_tokens` is None unless the options have `prompt_logprobs`. The first prompt token has no log-probability.
    """

    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int  # tokens of the prompt that were found in the cache
    queue_s: float
    end: Token | None = None
    prompt_tokens: tuple[Token, ...] | None = None


@dataclass(eq=False, slots=True)
class Stream(Waiting):
    """One prompt to continue. `on_token` is called with each token of the answer, in the thread that delivers.

    While the stream is in a cohort, `on_tokens` is called instead of `on_token`: once for all streams that share the function,
    with the `key` and the token id of each stream. `on_pass` is called after each pass that gave the stream a token: once for all
    streams that share the function.
    """

    prompt: TokenIds
    options: SamplingOptions
    seed: int  # seed of the random draws
    on_token: Callable[[Token], None] | None = None
    on_tokens: Listener | None = None
    key: int = -1
    on_pass: Callable[[], None] | None = None
    matcher: Matcher | None = None  # follows the grammar, if the request has one
    speculates: bool = False  # whether a pass may verify several tokens
    trusted_from: int = TRUSTED_FROM  # as in `Proposer`
    # Progress, kept by the scheduler.
    scores: dict[int, Token] = field(default_factory=dict)  # tokens of the prompt that are scored, by position
    pages: list[int] = field(default_factory=list)
    proposer: Proposer | None = None  # None until the scheduler first asks whether the stream is predicted
    proposed: dict[int, int] = field(default_factory=dict)  # tokens that a pass under way verifies, by position
    num_kept: int = 0  # pages that later sequences can find
    num_cached_tokens: int = 0
    counts: TokenCounts | None = None  # for penalties
    cohort: Cohort | None = None  # the cohort that the stream is in
    slot: int = 0  # the row of the stream in the cohort's arrays
    joined_at: int = 0  # the number of passes that the cohort had scheduled when the stream joined
    # The values of the properties without an underscore, without the changes by passes of the present cohort.
    _answer: list[Token] = field(default_factory=list)
    _num_computed: int = 0
    _num_chosen: int = 0
    _num_foreseen: int = 0

    def __post_init__(self) -> None:
        self.counts = TokenCounts.wanted_by(self.options, self.prompt)

    @classmethod
    def begin(cls, prompt: Sequence[int] | TokenIds, options: SamplingOptions, vocab_size: int, context: int) -> "Stream":
        """A stream that ends when the context is full. `context` is the most tokens of prompt and answer together.

        Raises: InvalidInput for options out of range, ids without an embedding, and a prompt that fills the context.
        """
        check_sampling(options, vocab_size)
        ids = checked_ids(0, prompt, vocab_size).astype(np.int32)
        room = context - len(ids)
        if room < min(1, options.max_tokens):  # a prompt that is only scored may fill the context
            raise InvalidInput(f"the prompt has {len(ids)} tokens; the model's context is {context} tokens")
        if options.max_tokens > room:
            options = replace(options, max_tokens=room)
        return cls(ids, options, random.getrandbits(63) if options.seed is None else options.seed)

    def go_on_after(self, token_ids: Sequence[int]) -> None:
        """Begin the answer with these tokens. Another engine has computed them from the same prompt and options.

        The stream is then in the state that preemption leaves: the next pass computes prompt and answer, and chooses the next
        token. Seed, penalties, grammar, `min_tokens` and `max_tokens` count these tokens as generated. If the tokens complete the
        answer, the stream ends. If the grammar does not allow a token, the stream fails. Call this method before any other.
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
        """Append tokens of the cohort, which have no log-probabilities."""
        self._answer += map(token_of, token_ids)

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are in the cache, or will be after the passes under way."""
        return self._num_computed + self._num_scheduled

    @num_computed.setter
    def num_computed(self, value: int) -> None:
        self._num_computed = value - self._num_scheduled

    @property
    def num_chosen(self) -> int:
        """Tokens of the answer that passes have chosen, including the passes under way."""
        return self._num_chosen + self._num_scheduled

    @num_chosen.setter
    def num_chosen(self, value: int) -> None:
        self._num_chosen = value - self._num_scheduled

    @property
    def num_foreseen(self) -> int:
        """The number of chosen tokens of passes under way."""
        return self._num_foreseen + self._num_under_way

    @num_foreseen.setter
    def num_foreseen(self, value: int) -> None:
        self._num_foreseen = value - self._num_under_way

    @property
    def _num_scheduled(self) -> int:
        """The number of scheduled passes of the cohort that have a token of the stream."""
        return 0 if self.cohort is None else self.cohort.num_scheduled - self.joined_at

    @property
    def _num_under_way(self) -> int:
        """The number of these passes whose tokens are not delivered."""
        return 0 if self.cohort is None else self.cohort.num_scheduled - max(self.cohort.num_delivered, self.joined_at)

    def join(self, cohort: Cohort, slot: int) -> None:
        """The stream has joined a cohort. From now on the cohort counts the stream's passes."""
        assert self.cohort is None, "a stream is in one cohort at most"
        self.cohort, self.slot, self.joined_at = cohort, slot, cohort.num_scheduled

    def leave(self) -> None:
        """The stream has left its cohort. Adds the cohort's passes to the stream's own counters."""
        self._num_foreseen, num_scheduled = self.num_foreseen, self._num_scheduled
        self._num_computed += num_scheduled
        self._num_chosen += num_scheduled
        self.cohort = None

    @property
    def just_goes_on(self) -> bool:
        """Whether the choice of each further token depends only on the logits and on the token's number in the answer."""
        options = self.options
        is_plain = options.logprobs is None and not (options.logprobs_of or options.logit_bias or options.allowed)
        return self.can_run_ahead and is_plain and (not options.stop_ids or self.num_chosen >= options.min_tokens)

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the answer."""
        return len(self.prompt) + len(self.answer)

    @property
    def prompt_tokens(self) -> tuple[Token, ...] | None:
        """The prompt's tokens and their log-probabilities. None without `prompt_logprobs`, or before all are scored."""
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

    def speculate(self, trusted_from: int = TRUSTED_FROM) -> None:
        """Let a pass verify several tokens if the next tokens are predicted. Call this method before any other.

        Does nothing for a short answer, and for a stream with a grammar, a penalty or n-gram bans.

        Args:
            trusted_from: as in `Proposer`.
        """
        self.trusted_from = trusted_from
        self.speculates = self.can_run_ahead and self.options.max_tokens >= _LEAST_SPECULATING

    @property
    def is_predicted(self) -> bool:
        """Whether the last tokens were predicted. Such a stream waits for its token and speculates."""
        return self.speculates and bool(self.answer) and self._followed().is_trusted

    @property
    def was_predicted(self) -> bool:
        """The same as `is_predicted`, for the tokens that the proposer has followed already."""
        return self.proposer is not None and self.proposer.is_trusted

    def follow(self, token: int, position: int) -> None:
        """A pass of the stream's cohort has chosen this token. Called only while streams are few."""
        if self.proposer is not None and self.proposer.num_tokens == position:
            self.proposer.add(token)
        else:
            self._followed()

    def _followed(self) -> Proposer:
        """The proposer, after it has followed all tokens of the answer. The scheduler calls this only while streams are few."""
        if self.proposer is None or self.proposer.num_tokens + _MOST_BEHIND < self.length:
            self.proposer = Proposer(self.ids, self.trusted_from)
        for token in self.answer[self.proposer.num_tokens - len(self.prompt) :]:
            self.proposer.add(token.id)
        return self.proposer

    @property
    def wants_more(self) -> bool:
        """Whether the answer may continue after the foreseen tokens."""
        return self.num_chosen < self.options.max_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.num_chosen - self.num_computed

    @property
    def num_uncached_tokens(self) -> int:
        # As in `prepare`: a prompt whose tokens get scores is computed as a whole.
        if self.pages or self.pool is None or not self._is_scored:
            return self.num_tokens
        return self.num_tokens - self.pool.num_kept_tokens(self.ids)

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
        """`pages`: a copy of the stream's pages. If the caller leaves, the stream gives its pages back at any time."""
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
        """Take pages for all tokens before the first token is computed: pages of the same prefix in the cache, and free pages."""
        assert self.pool is not None, "a stream is added to a scheduler first"
        if self.pages:
            return 0
        if not may_take_pages:
            return None
        # The score of a token needs the hidden state of the token before it, and the cache keeps no hidden states.
        shared = self.pool.match(self.ids) if self._is_scored else []
        fresh = self.pool.take(-(-self.length // self.pool.page_size) - len(shared))
        if fresh is None:
            self.pool.release(shared)
            return None
        self.pool.num_streams += 1
        self.pages = shared + fresh
        self.num_kept = len(shared)
        self.num_computed = len(shared) * self.pool.page_size
        if not self.answer:  # otherwise the cache has the prompt from an earlier computation of this stream
            self.num_cached_tokens = self.num_computed
        return self.num_computed

    def next_slice(self, room: int, alone: bool, wanted: float = 1, most_seqs: int = 1) -> Slice:
        assert self.cohort is None, "a cohort takes one slice for all of its streams"
        start, length = self._num_computed, len(self.prompt) + self._num_chosen
        self._num_computed = stop = min(start + room, length)
        if stop == length and self.options.max_tokens:
            self._num_chosen += 1
            self._num_foreseen += 1
        return Slice(self, 0, start, stop)

    def propose(self, most: int) -> list[Slice]:
        """Slices of up to `most` proposed tokens after the slice that was just taken. They fit into the stream's pages."""
        if not self.is_predicted or self.num_foreseen > 1:  # above 1 a pass under way has not yet given the last token
            return []
        assert self.pool is not None, "a stream is added to a scheduler first"
        room = len(self.pages) * self.pool.page_size - self.num_computed
        tokens = self._followed().propose(min(most, room, self.options.max_tokens - self.num_chosen))
        self.proposed = dict(enumerate(tokens, start=self.num_computed))
        return [self.next_slice(1, alone=False) for _ in tokens]

    def settle(self) -> None:
        """Forget the proposals: no pass under way has a slice of the stream. Positions after a wrong token are computed again."""
        if self.proposed:
            self.proposed = {}
            self.num_chosen, self.num_computed = len(self.answer), self.length - 1

    def piece(self, part: Slice) -> Piece | None:
        """The same as `Waiting.piece`. If the grammar allows no further token, the stream ends here.

        The mask of a token may be computed twice, for example after preemption.
        """
        pages, index = tuple(self.pages), part.stop - len(self.prompt)  # index: the place in the answer of the token to choose
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
        """The tokens of the prompt that one slice scores. A preempted stream is not scored again."""
        if self.options.prompt_logprobs is None or part.start >= len(self.prompt) or (self._is_scored and self.answer):
            return None
        return Scored(self.prompt[part.start + 1 : part.stop + 1], self.options.prompt_logprobs)

    def accept_scores(self, part: Slice, tokens: Sequence[Token]) -> None:
        """Keep the scored tokens of one slice. If `max_tokens` is 0, the stream ends after its prompt."""
        if self.future.done():
            return  # the caller has left
        self.scores |= enumerate(tokens, start=part.start + 1)
        if part.stop == len(self.prompt) and not self.options.max_tokens:
            self._end("length")

    def take(self, part: Slice, token: Token | None) -> bool:
        """Take the token that a pass has chosen after a slice. `token` is None if the logits are not finite.

        Returns: False, without any change, if the stream has ended or the slice follows a wrong proposal.
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
        """Add the token that a pass has chosen. A stop id, the grammar or `max_tokens` may end the stream."""
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
        """Give the caller a token of the cohort. If the caller's function raises, the stream fails."""
        try:
            if self.on_token is not None:
                self.on_token(token_of(token_id))
        except Exception as error:
            self.fail(error)

    @property
    def queue_s(self) -> float:
        """The wait for the first pass; 0 before it, and if `go_on_after` completed the answer."""
        return 0.0 if self.first_scheduled_at is None else self.first_scheduled_at - self.submitted_at

    def _end(self, reason: FinishReason, token: Token | None = None) -> None:
        counts = len(self.prompt), self.num_cached_tokens
        result = Answer(tuple(self.answer), reason, *counts, self.queue_s, token, self.prompt_tokens)
        with suppress(InvalidStateError):  # the caller has left
            self.future.set_result(result)

    def keep(self, part: Slice) -> None:
        """The same as `Waiting.keep`. A page with proposed tokens is kept later, when these tokens are verified."""
        if self.pool is None or not self.pages or part.stop > self.length:
            return
        num_full = part.stop // self.pool.page_size
        if num_full > self.num_kept:
            self.pool.keep(self.pages, self.ids[: part.stop])
            self.num_kept = num_full

    def keep_delivered(self) -> None:
        """The same as `keep`, after a delivered pass of the stream's cohort: all tokens but the answer's last are computed."""
        self.keep(Slice(self, 0, 0, self.length - 1))

    def give_back(self) -> None:
        """Release the pages. All tokens must then be computed again."""
        if self.pool is None or not self.pages:
            return
        self.pool.release(self.pages)
        self.pool.num_streams -= 1
        self.pages, self.num_computed, self.num_kept = [], 0, 0
