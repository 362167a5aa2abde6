"""JSON schemas of the responses, for the OpenAPI document."""

from collections.abc import Mapping, Sequence
from typing import Any

Schema = dict[str, Any]

_STRING, _NUMBER, _INTEGER, _BOOLEAN, _OBJECT = ({"type": kind} for kind in ("string", "number", "integer", "boolean", "object"))


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _enum(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _nullable(schema: Schema) -> Schema:
    return {"type": schema["type"], "nullable": True, **schema}


def _object(properties: Mapping[str, Schema], required: Sequence[str] | None = None) -> Schema:
    """`required` None: all of the properties."""
    return {"type": "object", "required": list(properties if required is None else required), "properties": properties}


def _optional(**properties: Schema) -> Schema:
    """An object whose properties may all be missing."""
    return {"type": "object", "properties": properties}


FLOATS = _list(_NUMBER)
VECTORS = _list(FLOATS)
_EMBEDDING = {
    "object": _enum("embedding"),
    "embedding": {"anyOf": [FLOATS, {"type": "string", "description": "base64"}]},
    "index": _INTEGER,
    "chunk": _object(dict.fromkeys(("index", "start", "end"), _INTEGER)),
}
OPENAI_LIST = _object(
    {
        "object": _enum("list"),
        "data": _list(_object(_EMBEDDING, ("object", "embedding", "index"))),
        "model": _STRING,
        "usage": _object(dict.fromkeys(("prompt_tokens", "total_tokens"), _INTEGER)),
    }
)
USAGE = _object(
    dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _INTEGER)
    | {"prompt_tokens_details": _optional(cached_tokens=_INTEGER)}
)


def _generated(kind: str, **choice: Schema) -> Schema:
    properties = {
        "index": _INTEGER,
        "logprobs": _nullable(_OBJECT),
        "finish_reason": _enum("stop", "length"),
        "stop_reason": {"anyOf": [_STRING, _INTEGER], "nullable": True},
    } | choice
    return _object(
        {
            "id": _STRING,
            "object": _enum(kind),
            "created": _INTEGER,
            "model": _STRING,
            "choices": _list(_object(properties)),
            "usage": USAGE,
        }
    )


COMPLETION = _generated("text_completion", text=_STRING)
CHAT = _generated("chat.completion", message=_object({"role": _enum("assistant"), "content": _STRING}))
_VALUE = {"anyOf": [_STRING, _BOOLEAN]}


def _decided(kind: str, **fields: Schema) -> Schema:
    return _object({"type": _enum(kind), "name": _nullable(_STRING)} | fields)


def _probabilities(**fields: Schema) -> Schema:
    return _list(_object(fields | {"probability": _NUMBER}))


_DECISION = {
    "anyOf": [
        _decided("predicate", probability=_NUMBER),
        _decided("choice", choice=_VALUE, probabilities=_probabilities(value=_VALUE), confidence=_NUMBER),
        _decided("score", score=_NUMBER, probabilities=_probabilities(value=_INTEGER, label=_STRING), confidence=_NUMBER),
    ]
}
DECISIONS = _object(
    {
        "model": _STRING,
        "answers": _list(_DECISION),
        "usage": _object(
            {
                "input_tokens": _INTEGER,
                "input_tokens_details": _OBJECT,
                "output_tokens": _INTEGER,
                "output_tokens_details": _OBJECT,
                "total_tokens": _INTEGER,
            }
        ),
    }
)
_TOKEN = {
    "id": _INTEGER,
    "text": _STRING,
    "special": _BOOLEAN,
    "start": _nullable(_INTEGER),
    "stop": _nullable(_INTEGER),
}
TOKENS = _list(_list(_object(_TOKEN)))
PROMPT_TOKENS = _object(
    {
        "count": _INTEGER,
        "max_model_len": _INTEGER,
        "tokens": _list(_INTEGER),
        "token_strs": _nullable(_list(_nullable(_STRING))),
    }
)
TOKENIZED = {"anyOf": [TOKENS, PROMPT_TOKENS]}
PROMPT = _object({"prompt": _STRING})
TOKENIZER_INFO = _object(
    {"tokenizer_class": _STRING} | dict.fromkeys(("bos_token", "eos_token", "pad_token", "chat_template"), _nullable(_STRING))
)
_POOL = {"name": _STRING, "node_class": _STRING, "dtypes": _list(_STRING), "revisions": _list(_STRING)}
INFO = _object(
    {
        "model_id": _STRING,
        "model_sha": _nullable(_STRING),
        "model_dtype": _STRING,
        "dtype_closeness": _nullable(_optional(model=_STRING, mean_cosine=_NUMBER, top_10_overlap=_NUMBER)),
        "served_model_name": _STRING,
        "model_type": _OBJECT,
        "max_concurrent_requests": _INTEGER,
        "max_input_length": _INTEGER,
        "max_batch_tokens": _INTEGER,
        "max_client_batch_size": _INTEGER,
        "auto_truncate": _BOOLEAN,
        "tokenization_workers": _INTEGER,
        "version": _STRING,
        "pools": _list(_object(_POOL)),
    },
    ("model_id", "model_type", "max_input_length", "max_client_batch_size"),
)
MODELS = _object(
    {"object": _enum("list"), "data": _list(_OBJECT | {"required": ["id", "object", "created", "owned_by"]})},
)
COHERE_EMBEDDINGS = _object(
    {
        "response_type": _enum("embeddings_floats", "embeddings_by_type"),
        "id": _STRING,
        "embeddings": {"anyOf": [VECTORS, _OBJECT]},
        "texts": _list(_STRING),
        "meta": _OBJECT,
    },
    ("response_type", "id", "embeddings", "meta"),
)

CHUNKS = _list(_object({"start": _INTEGER, "end": _INTEGER, "embedding": FLOATS}))
SPARSE = _list(_object({"index": _INTEGER, "value": _NUMBER}))
EMBEDDED = {"anyOf": [VECTORS, _list(CHUNKS)]}
SPARSE_LIST = _list(SPARSE)
TOKEN_VECTORS = _list(VECTORS)
HYBRID = _list(_optional(dense=FLOATS, sparse=SPARSE, colbert=VECTORS))
RANKS = _list(_object({"index": _INTEGER, "score": _NUMBER, "text": _STRING}, ("index", "score")))
_RANK = {"index": _INTEGER, "relevance_score": _NUMBER, "document": _optional(text=_STRING)}
COHERE_RANKS = _object(
    {
        "id": _STRING,
        "model": _STRING,
        "results": _list(_object(_RANK, ("index", "relevance_score"))),
        "usage": _OBJECT,
        "meta": _OBJECT,
    },
    ("id", "results"),
)
PREDICTIONS = _list(_object({"score": _NUMBER, "label": _STRING}))
PREDICTED = {"anyOf": [PREDICTIONS, _list(PREDICTIONS)]}
ANY_TASK = {"anyOf": [EMBEDDED, FLOATS, SPARSE_LIST, PREDICTED, RANKS]}

TEXTS = _list(_STRING)
RERANKED = {"anyOf": [RANKS, COHERE_RANKS]}
VERTEX = _object({"predictions": _list({})})
