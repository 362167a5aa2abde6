"""The messages between gateway and replica about streams.

A replica sends one message after a pass, for all streams of one gateway. A call through Serve for each token would cost each side
a millisecond (docs/decisions/032).
"""

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.options import Priority, SamplingOptions, TokenIds
from engine.request_tag import RequestTag
from engine.schedule.stream import FinishReason, Token
from serve_app.gateway.frames import Payload


class NewStream(NamedTuple):
    """A stream to begin or to continue. `number` identifies the stream in its channel."""

    number: int
    prompt: TokenIds
    options: SamplingOptions  # with a seed, so that another replica would give the same answer
    priority: Priority
    deadline_s: float  # remaining seconds for the whole answer; inf for no deadline
    answered: NDArray[np.int32]  # [n] the tokens of the answer that another replica has computed
    owner: str = ""  # see `Qos.owner`
    tags: tuple[RequestTag, ...] = ()  # of the stream's request


class Begun(NamedTuple):
    """The beginning of an answer: attributes of `engine.schedule.stream.Stream`."""

    num_cached_tokens: int
    queue_s: float


class End(NamedTuple):
    """The end of an answer: fields of `engine.schedule.stream.Answer`."""

    finish_reason: FinishReason
    end: Token | None


Ended: TypeAlias = End | Exception


@dataclass(frozen=True, slots=True)
class Steps:
    """The new tokens and ends of one channel's streams since the last message. Tokens of a stream are in order."""

    numbers: NDArray[np.int32]  # [T] the stream of each token
    token_ids: NDArray[np.int32]  # [T]
    logprobs: dict[int, Token]  # the whole token, by its index in `token_ids`, if the request asks for more than the id
    begun: dict[int, Begun]  # by stream; sent with the first token of an answer, or with its end
    scores: dict[int, dict[int, Token]]  # `Stream.scores`, by stream; sent at the same time as `begun`
    ends: dict[int, Ended]  # by stream

    @property
    def plain_bytes(self) -> bytes | None:
        """This message without pickle: the numbers, then the token ids. None if it has more than ids of tokens."""
        if self.logprobs or self.begun or self.scores or self.ends:
            return None
        return self.numbers.tobytes() + self.token_ids.tobytes()

    @classmethod
    def of_plain(cls, content: Payload) -> "Steps":
        """The message of `plain_bytes`."""
        numbers, token_ids = np.frombuffer(content, np.int32).reshape(2, -1)
        return cls(numbers, token_ids, {}, {}, {}, {})


@dataclass(slots=True)
class Unsent:
    """A message that grows until it is sent."""

    numbers: "array[int]" = field(default_factory=lambda: array("i"))
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: dict[int, Token] = field(default_factory=dict)
    begun: dict[int, Begun] = field(default_factory=dict)
    scores: dict[int, dict[int, Token]] = field(default_factory=dict)
    ends: dict[int, Ended] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.numbers or self.ends)

    def add(self, number: int, token: Token) -> None:
        if token.logprob is not None or token.logprobs_of:
            self.logprobs[len(self.numbers)] = token
        self.numbers.append(number)
        self.token_ids.append(token.id)

    def add_plain(self, numbers: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        """The same as `add` for each token. The tokens have no log-probabilities."""
        self.numbers.frombytes(numbers.tobytes())
        self.token_ids.frombytes(token_ids.tobytes())

    def packed(self) -> Steps:
        numbers, token_ids = np.frombuffer(self.numbers, np.int32), np.frombuffer(self.token_ids, np.int32)
        return Steps(numbers, token_ids, self.logprobs, self.begun, self.scores, self.ends)
