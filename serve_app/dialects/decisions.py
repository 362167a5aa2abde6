"""OpenAI's decisions: probabilities for typed questions about one input."""

from typing import Any

from engine.errors import InvalidInput
from serve_app.compute.decisions import Asked, Decisions, Read
from serve_app.compute.service import Service
from serve_app.compute.tasks import check_generates, generating
from serve_app.dialects.decision_bodies import AnyQuestion, ChoiceQuestion, DecisionRequest, PredicateQuestion, text_of
from serve_app.dialects.generation import read_generation_qos
from serve_app.dialects.generation_bodies import parse_request
from serve_app.dialects.handler import Headers, Reply
from serve_app.errors import BadRequest

_INTRODUCTIONS = {
    "predicate": "Is this statement about the text above true or false?",
    "choice": "Choose the option that fits the text above best.",
    "score": "Choose the level that fits the text above best. The lowest level comes first.",
}


def parse_decisions(_service: Service, content: bytes) -> DecisionRequest:
    return parse_request(DecisionRequest, content)


async def decisions(service: Service, body: DecisionRequest, headers: Headers) -> Reply:
    model = generating(service.backend.get(body.model, check_generates))
    if not (state := body.state):
        raise BadRequest("`input` cannot be empty", "input")
    asked = [Asked(f"{_INTRODUCTIONS[each.type]}\n{text_of(each.instructions)}", each.options) for each in body.questions]
    try:
        reads, usage = await Decisions(state, asked).read(service, model, read_generation_qos(headers))
    except InvalidInput as error:
        raise BadRequest(str(error)) from None
    answers = [_answer(question, read) for question, read in zip(body.questions, reads, strict=True)]
    return Reply(
        {
            "model": model.info.served_model_name,
            "answers": answers,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                # 0, because the cache keeps the pages of every prompt anyway, and they cost nothing.
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        },
        model,
    )


def _answer(question: AnyQuestion, read: Read) -> dict[str, Any]:
    head = {"type": question.type, "name": question.name}
    if isinstance(question, PredicateQuestion):
        return head | {"probability": read.probabilities[1]}
    if isinstance(question, ChoiceQuestion):
        values = [each.value for each in question.choices]
        probabilities = [{"value": value, "probability": each} for value, each in zip(values, read.probabilities, strict=True)]
        return head | {"choice": values[read.top], "probabilities": probabilities, "confidence": read.confidence}
    levels = zip(question.levels, read.probabilities, strict=True)
    return head | {
        "score": sum(value * each for value, each in enumerate(read.probabilities)),
        "probabilities": [
            {"value": value, "label": level.label, "probability": each} for value, (level, each) in enumerate(levels)
        ],
        "confidence": read.confidence,
    }
