"""The options of requests to the engine. Imports neither torch nor tokenizers, so every process can use these types."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidInput
from engine.model.config import ONE_TOKEN, GenerationConfig, OutputName

TokenIds = NDArray[np.int32]
TextOrIds = str | list[int]
# One input of the library: the types of a request's body, or a 1-D array of whole numbers.
Input = TextOrIds | NDArray[np.integer[Any]]
Direction = Literal["left", "right"]
InputType = Literal["query", "document", "classification", "clustering"]
Priority = Literal["interactive", "batch"]


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """The tokenisation of a request's inputs. `truncate=False` refuses inputs that are too long.

    `truncation_direction` is the side that loses tokens; None is the side that the model's tokenizer names.
    The prompt before each text is `prompt`, or the model's prompt called `prompt_name`, or the model's prompt for `input_type`
    (no prompt if the model has none for it), or the default prompt. `max_tokens` is a limit below the model's own, including
    special tokens. The second text of a pair loses its tokens beyond `max_document_tokens`, also with `truncate=False`.
    """

    truncate: bool = True
    truncation_direction: Direction | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    input_type: InputType | None = None
    max_tokens: int | None = None
    max_document_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EmbedOptions:
    """The outputs that a request asks for, for each of its sequences.

    `dimensions` is the number of leading dimensions of a vector to keep (Matryoshka); None keeps all. `pooled` asks for one
    vector. `outputs` asks for further results; of these only chunks are cut to `dimensions` and normalised:
    "tokens": the hidden state of each token. "sparse": weights of words of the vocabulary.
    "colbert": BGE-M3's vector of each token except the first. "chunks": a vector for each of `spans`, pooled like the vector of a
    sequence, from hidden states of the whole sequence (late chunking, arXiv:2409.04701). A span is [start, stop) in tokens.
    """

    normalize: bool = True
    dimensions: int | None = None
    pooled: bool = True
    outputs: tuple[OutputName, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()


WHOLE = EmbedOptions()  # asks for a whole, normalised vector


# The largest temperature, penalty and bias. Far larger ones make a logit infinite.
_LARGEST = 1000


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The options by which the tokens of an answer are chosen. The defaults change no logit.

    The order is vLLM's: raw log-probabilities, then `allowed` tokens, `logit_bias`, penalties, temperature, `min_p`, `top_k`,
    `top_p`, and the draw. `temperature` 0 takes the likeliest token. `top_k` 0, `top_p` 1 and `min_p` 0 keep all tokens.
    `repetition_penalty` counts tokens of the prompt and of the answer; the other two penalties count those of the answer.
    `no_repeat_ngram` n bans each token that would repeat n tokens of prompt and answer in the same order; 0 bans none.
    The same `seed` and prompt give the same tokens, independent of other requests; None draws a seed.
    `stop_ids` end the answer and do not belong to it. They are banned before `min_tokens` tokens. `logprobs` asks for the
    log-probability of each token, and of this number of the likeliest tokens; None asks for no log-probabilities. `logprobs_of`
    also asks for those of the given ids. `prompt_logprobs` is `logprobs` for the tokens of the prompt. With `prompt_logprobs`,
    `max_tokens` may be 0: then the prompt is scored, and there is no answer.
    `grammar` constrains the form of the answer; `engine/text/grammar.py` makes such texts. It further restricts `allowed`. The
    answer ends when the grammar allows no further token, even before `min_tokens`. If the grammar allows both an end and a
    further token, a stop id ends the answer.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, the number that is added to its logit)
    allowed: tuple[int, ...] | None = None  # the ids that may be chosen; None: all
    seed: int | None = None
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    logprobs_of: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    no_repeat_ngram: int = 0
    grammar: str | None = None

    def chosen(self, said: GenerationConfig, **given: Any) -> "SamplingOptions":
        """These options, replaced by values of the model's authors, and then by values of the caller. None replaces nothing.

        Args:
            said: the values of the model's authors.
            given: the values of the caller, by the options' names.
        """
        theirs = {
            "max_tokens": said.max_new_tokens,
            "temperature": said.temperature,
            "top_k": said.top_k,
            "top_p": said.top_p,
            "min_p": said.min_p,
            "repetition_penalty": said.repetition_penalty,
            "stop_ids": said.eos_ids,
        }
        values = theirs | {name: value for name, value in given.items() if value is not None}
        return replace(self, **{name: value for name, value in values.items() if value is not None})


def check_sampling(options: SamplingOptions, vocab_size: int) -> None:
    """Raises: InvalidInput naming the option, its value, and the allowed values."""
    limits = {
        "max_tokens": (1 if options.prompt_logprobs is None else 0, inf),
        "temperature": (0, _LARGEST),
        "top_k": (0, 2**32 - 1),
        "top_p": (0, 1),
        "min_p": (0, 1),
        "repetition_penalty": (1 / _LARGEST, _LARGEST),
        "presence_penalty": (-_LARGEST, _LARGEST),
        "frequency_penalty": (-_LARGEST, _LARGEST),
        "min_tokens": (0, inf),
        "no_repeat_ngram": (0, inf),
        "logprobs": (0, vocab_size),
        "prompt_logprobs": (0, vocab_size),
    }
    for name, (least, most) in limits.items():
        value = getattr(options, name)
        # not `isfinite`, which fails for a whole number beyond all floats
        if value is not None and not (least <= value <= most and value != inf):
            allowed = f"{least} or more" if most == inf else f"a number from {least} to {most}"
            raise InvalidInput(f"{name} is {value}, expected {allowed}")
    for token, bias in options.logit_bias:
        if not 0 <= token < vocab_size or not abs(bias) <= _LARGEST:
            raise InvalidInput(
                f"logit_bias gives token {token} {bias}, expected a token below {vocab_size} and a number from {-_LARGEST} to "
                f"{_LARGEST}"
            )
    for name in ("allowed", "logprobs_of", "stop_ids"):
        may_not = [token for token in getattr(options, name) or () if not 0 <= token < vocab_size]
        if may_not:
            raise InvalidInput(f"{name} has token {may_not[0]}, the vocabulary ends at {vocab_size - 1}")
    if options.allowed is not None and set(options.allowed) <= (set(options.stop_ids) if options.min_tokens else set()):
        raise InvalidInput("no token may be chosen: allowed has no token, or only stop_ids, which min_tokens forbids at first")


def check_outputs(options: EmbedOptions, outputs: Sequence[OutputName], pooling: str, lengths: Iterable[int]) -> None:
    """Checks that a model with these `outputs` and this pooling supports the options, for sequences of these lengths.

    Raises: InvalidInput naming the output, or the first span that is not within every sequence.
    """
    for name in options.outputs:
        if name == "chunks" and pooling in ONE_TOKEN:
            raise InvalidInput(
                f"this model has no vectors of chunks: it pools one token of a text ({pooling}), not all of a chunk's"
            )
        if name not in outputs:
            raise InvalidInput(f"this model has no `{name}` output; besides vectors it gives {', '.join(outputs) or 'none'}")
    shortest = min(lengths, default=0) if options.spans else 0
    for start, stop in options.spans:
        if not 0 <= start < stop <= shortest:
            raise InvalidInput(f"span [{start}, {stop}) is not within the input's {shortest} tokens, or is empty")


def check_dimensions(dimensions: int | None, embedding_size: int) -> None:
    """Raises: InvalidInput for a number of dimensions to which the model's vectors cannot be cut."""
    if dimensions is not None and dimensions <= 0:
        raise InvalidInput("`dimensions` should be positive")
    if dimensions is not None and dimensions > embedding_size:
        raise InvalidInput("`dimensions` should be smaller than the maximum embedding dimension.")
