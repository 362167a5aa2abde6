"""vLLM's routes for the tokenizer of a generation model: `/tokenize`, `/detokenize` and `/tokenizer_info`.

lm-eval calls these routes if it has no tokenizer of its own. TEI also has a `/tokenize`, with other fields, for all models.
"""

from typing import Any

import numpy as np
from pydantic import model_validator

from engine.options import TokenIds
from engine.text.prompts import Prompts
from serve_app.compute.service import Service
from serve_app.compute.tasks import check_generates, generating
from serve_app.dialects import tei
from serve_app.dialects.bodies import ModelBody, fields_of, parse_body
from serve_app.dialects.fields import Items
from serve_app.dialects.generation_bodies import Unsigned, parse_request
from serve_app.dialects.handler import Headers, Reply
from serve_app.dialects.tei_bodies import TokenizeRequest
from serve_app.dialects.tools import with_parsed_calls
from serve_app.errors import BadRequest


class PromptTokenizeRequest(ModelBody):
    """A text, or a conversation that becomes a prompt by the model's chat template.

    `add_special_tokens` null means true for a text and false for a conversation, because the template adds special tokens.
    """

    prompt: str | None = None
    messages: Items[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Items[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_one(self) -> "PromptTokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send one of `prompt` and `messages`")
        return self

    def encode(self, prompts: Prompts) -> TokenIds:
        """Raises: InvalidInput for messages that the chat template refuses."""
        if self.prompt is not None:
            return prompts.encode(self.prompt, add_special_tokens=self.add_special_tokens is not False)
        return prompts.encode_chat(
            with_parsed_calls(self.messages or []),
            add_special_tokens=bool(self.add_special_tokens),
            tools=self.tools or None,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            template_kwargs=self.chat_template_kwargs or {},
        )


class DetokenizeRequest(ModelBody):
    tokens: Items[Unsigned]


def parse_tokenize(_service: Service, content: bytes) -> TokenizeRequest | PromptTokenizeRequest:
    """A body of `/tokenize`: TEI's has `inputs`, vLLM's has `prompt` or `messages`."""
    fields = fields_of(content)
    if "inputs" not in fields and ("prompt" in fields or "messages" in fields):
        return parse_body(PromptTokenizeRequest, content)
    return parse_body(TokenizeRequest, content)


def parse_detokenize(_service: Service, content: bytes) -> DetokenizeRequest:
    return parse_request(DetokenizeRequest, content)


async def tokenize(service: Service, body: TokenizeRequest | PromptTokenizeRequest, headers: Headers) -> Reply:
    if isinstance(body, TokenizeRequest):
        return await tei.tokenize(service, body, headers)
    model = generating(service.backend.get(body.model, check_generates))
    with service.admission.admit(1):
        num_chars = len(body.prompt or "") or len(str(body.messages)) + len(str(body.tools))
        ids, told = await service.off_loop(num_chars, _encoded, body, model.prompts)
    return Reply({"count": len(ids), "max_model_len": model.info.max_input_length, "tokens": ids, "token_strs": told}, model)


def _encoded(body: PromptTokenizeRequest, prompts: Prompts) -> tuple[TokenIds, list[str | None] | None]:
    """The token ids, and the tokens if the request asks for them."""
    ids = body.encode(prompts)
    return ids, [prompts.token(each) for each in ids.tolist()] if body.return_token_strs else None


async def detokenize(service: Service, body: DetokenizeRequest, _headers: Headers) -> Reply:
    model = generating(service.backend.get(body.model, check_generates))
    if (largest := max(body.tokens, default=0)) >= model.info.vocab_size:
        raise BadRequest(f"`tokens` has token id {largest}, the vocabulary ends at {model.info.vocab_size - 1}", "tokens")
    with service.admission.admit(1):
        ids = np.array(body.tokens, dtype=np.int64)
        return Reply({"prompt": await service.off_loop(len(ids), model.prompts.decode, ids)}, model)
