"""Scored prompts in the scheduler, on a fake device whose scores depend on the content of the stream's pages."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_streams import PAGE_SIZE, Device, answer_of, ids, next_token, stream, words

from engine.passes import Passes
from engine.run.flight import Finished
from engine.schedule.piece import Piece
from engine.schedule.stream import Token


class ScoringDevice(Device):
    """A token's log-probability is minus `next_token` of all tokens before the token."""

    def launch(self, sequences: Sequence[Any], options: object, outputs: object, pieces: Sequence[Piece] = ()) -> Finished:
        finished = super().launch(sequences, options, outputs, pieces)
        scores = [self._scores(piece) for piece in pieces if piece.scored is not None]
        return Finished(replace(finished.output, scores=scores))

    def _scores(self, piece: Piece) -> list[Token]:
        assert piece.scored is not None
        places = [piece.pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in range(piece.start + len(piece.token_ids))]
        seen = self.cache[places].tolist()
        return [
            Token(token, -next_token(seen[: piece.start + index + 1]), ())
            for index, token in enumerate(piece.scored.targets.tolist())
        ]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(words, st.integers(0, 12), st.booleans()), min_size=1, max_size=8),
    st.integers(8, 20),
    st.integers(1, 30),
    st.integers(4, 40),
)
def test_every_prompt_is_scored_by_all_that_is_before_it(
    asked: list[tuple[list[int], int, bool]], num_pages: int, budget: int, most_tokens: int
) -> None:
    """The cases: chunks, other streams in a pass, streams that give up pages, and passes that are halved for lack of memory."""
    device = ScoringDevice(num_pages, most_tokens)
    streams = []
    for prompt, most, is_scored in asked:
        each = stream(prompt, int(most or not is_scored))
        each.options = replace(each.options, prompt_logprobs=0 if is_scored else None)
        streams.append(each)
    passes = Passes(device, budget)
    for _ in passes.steps(streams):
        device.pages.check_integrity()
    for each, (prompt, most, is_scored) in zip(streams, asked, strict=True):
        answer = each.future.result(0)
        assert ids(answer) == answer_of(prompt, int(most or not is_scored))
        expected = [(token, None if not at else -next_token(prompt[:at])) for at, token in enumerate(prompt)]
        told = None if answer.prompt_tokens is None else [(token.id, token.logprob) for token in answer.prompt_tokens]
        assert told == (expected if is_scored else None)
    assert device.pages.num_free == num_pages
    assert not passes.scheduler.has_work
