"""Computes the tokens of texts, to show them to the client."""

from collections.abc import Sequence

from engine.options import EncodeOptions
from engine.text.tokenizer import Token
from serve_app.compute.service import Service
from serve_app.errors import BadBody
from serve_app.models import ServedModel

# The most characters that are tokenised at once with offsets. The answer to /tokenize takes about 70 times the memory of its
# text, and the encoding of a text 300 bytes for each character.
MOST_CHARS = 500_000


async def shown_tokens(
    service: Service, model: ServedModel, texts: Sequence[str], add_special_tokens: bool, options: EncodeOptions
) -> list[list[Token]]:
    """The tokens of each text. Raises: as `Tokenizer.tokens`; BadBody for more than `MOST_CHARS` characters."""
    num_chars = sum(map(len, texts)) + len(options.prompt or "") * len(texts)
    if num_chars > MOST_CHARS:
        raise BadBody(f"the inputs have {num_chars} characters, the limit is {MOST_CHARS}; send them in parts", 413)
    return await service.off_loop(num_chars, model.tokenizer.tokens, texts, add_special_tokens, options)
