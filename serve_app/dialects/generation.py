"""OpenAI's chat completions and completions."""

from math import inf

from serve_app.admission.qos import Qos, read_qos
from serve_app.compute.generation import Generation
from serve_app.compute.service import Service
from serve_app.compute.tasks import check_generates, generating
from serve_app.dialects.chat_answers import ChatAnswers
from serve_app.dialects.completion_answers import CompletionAnswers
from serve_app.dialects.generation_bodies import ChatRequest, CompletionRequest
from serve_app.dialects.handler import Headers, Reply
from serve_app.errors import BadHeader, BadRequest


async def chat(service: Service, body: ChatRequest, headers: Headers) -> Reply:
    model = generating(service.backend.get(body.model, check_generates))
    answers = ChatAnswers(body, model, Generation(service, model, body.wanted(model), read_generation_qos(headers)))
    return Reply(answers if body.stream else await answers.whole(), model)


async def completions(service: Service, body: CompletionRequest, headers: Headers) -> Reply:
    model = generating(service.backend.get(body.model, check_generates))
    answers = CompletionAnswers(body, model, Generation(service, model, body.wanted(model), read_generation_qos(headers)))
    return Reply(answers if body.stream else await answers.whole(), model)


def read_generation_qos(headers: Headers) -> Qos:
    """The request's QoS. A deadline may be later than the server's timeout, which counts only until the first token."""
    try:
        return read_qos(headers, inf)
    except BadHeader as error:
        raise BadRequest(str(error)) from None
