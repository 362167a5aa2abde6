"""The handlers of TEI's routes, and of our own routes in TEI's form."""

import asyncio
from typing import Any

from serve_app.admission.request_state import RequestState
from serve_app.compute.service import Service
from serve_app.compute.tokens import shown_tokens
from serve_app.dialects import cohere
from serve_app.dialects.bodies import ModelBody, fields_of, parse_body, parse_instance
from serve_app.dialects.cohere import CohereRerankRequest
from serve_app.dialects.handler import Headers, Reply
from serve_app.dialects.tei_answers import answer, check_task, inputs_of, schema_for
from serve_app.dialects.tei_bodies import DecodeRequest, EmbedRequest, RerankRequest, TaskBody, TokenizeRequest, VertexRequest
from serve_app.errors import BadInstance, EmptyBatch
from serve_app.gather import gather
from serve_app.models import ServedModel

# Instances of /vertex that are computed at the same time. The start of one takes about 0.2 ms.
_INSTANCES = 64


async def task(service: Service, body: TaskBody, _headers: Headers) -> Reply:
    """The task of the body's schema."""
    inputs, model = inputs_of(body), _able_model(service, body)
    with service.admission.admit(len(inputs), model):
        state = service.begin(inputs)
        content = await answer(service, state, model, body)
    return Reply(content, model, state)


def parse_by_task(service: Service, content: bytes) -> TaskBody:
    """A body of `POST /`, to which huggingface_hub sends all tasks: the model's task and the body's fields decide the schema."""
    model = service.backend.get(parse_body(ModelBody, content).model if b'"model"' in content else None)
    is_embed = model.info.embeds and b'"source_sentence"' not in content and b'"texts"' not in content
    return parse_body(schema_for(model.info, {} if is_embed else fields_of(content)), content)


async def rerank(service: Service, body: RerankRequest | CohereRerankRequest, headers: Headers) -> Reply:
    if isinstance(body, CohereRerankRequest):
        return await cohere.rerank(service, body, headers, version="2")
    return await task(service, body, headers)


def parse_rerank(_service: Service, content: bytes) -> RerankRequest | CohereRerankRequest:
    """A body of `/rerank`: TEI's has `texts`, Cohere's and Jina's has `documents`."""
    if "documents" in (fields := fields_of(content)) and "texts" not in fields:
        return parse_body(CohereRerankRequest, content)
    return parse_body(RerankRequest, content)


async def vertex(service: Service, body: VertexRequest, _headers: Headers) -> Reply:
    """Vertex AI's wrapper: its instances are bodies of other routes. `_INSTANCES` run concurrently; the first failure is the
    answer."""
    instances: list[TaskBody] = []
    for index, each in enumerate(body.instances):
        instances.append(_instance(service, index, each))
        if index % _INSTANCES == 0:
            await asyncio.sleep(0)  # let other requests run
    inputs = [inputs_of(each) for each in instances]
    models = [_able_model(service, each) for each in instances]
    with service.admission.admit(sum(map(len, inputs)), models[0] if models else None):
        qos = service.begin(()).qos  # also without instances, so that a wrong header is always refused
        states = [RequestState(each, qos) for each in inputs]
        num_chars = sum(state.num_chars for state in states)
        for state in states:
            state.chars_to_tokenize = num_chars  # of all instances: many small ones together would block the event loop
        work = list(zip(states, models, instances, strict=True))
        predictions: list[Any] = []
        for first in range(0, len(work), _INSTANCES):
            predictions += await gather(answer(service, *each) for each in work[first : first + _INSTANCES])
    return Reply({"predictions": predictions}, models[0] if len({id(each) for each in models}) == 1 else None)


async def tokenize(service: Service, body: TokenizeRequest, _headers: Headers) -> Reply:
    if not body.inputs:
        raise EmptyBatch("`inputs` cannot be empty")
    model = service.backend.get(body.model)
    with service.admission.admit(len(body.inputs)):
        args = body.inputs, body.add_special_tokens, body.encode_options(service.settings.auto_truncate)
        return Reply(await shown_tokens(service, model, *args), model)


async def decode(service: Service, body: DecodeRequest, _headers: Headers) -> Reply:
    model = service.backend.get(body.model)
    with service.admission.admit(len(body.ids)):
        args = body.ids, body.skip_special_tokens
        return Reply(await service.off_loop(sum(map(len, body.ids)), model.tokenizer.decode, *args), model)


def _able_model(service: Service, body: TaskBody) -> ServedModel:
    """The model that the body names. Raises: UnknownModel, WrongTask."""
    model = service.backend.get(body.model, lambda info: check_task(info, body))
    check_task(model.info, body)
    return model


def _instance(service: Service, index: int, instance: Any) -> TaskBody:
    fields = instance if isinstance(instance, dict) else {}
    name = fields.get("model")
    model = service.backend.get(name if isinstance(name, str) else None)
    body = parse_instance(schema_for(model.info, fields), index, instance)
    if isinstance(body, EmbedRequest) and body.chunking is not None:
        raise BadInstance(f"instances.{index}: `chunking` is not available here; send it to /embed")
    return body
