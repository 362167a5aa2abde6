"""JSON schemas of the responses, for the OpenAPI document."""

from typing import Any

FLOATS = {"type": "array", "items": {"type": "number"}}
VECTORS = {"type": "array", "items": FLOATS}
OPENAI_LIST = {
    "type": "object",
    "required": ["object", "data", "model", "usage"],
    "properties": {
        "object": {"type": "string", "enum": ["list"]},
        "data": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["object", "embedding", "index"],
                "properties": {
                    "object": {"type": "string", "enum": ["embedding"]},
                    "embedding": {"anyOf": [FLOATS, {"type": "string", "description": "base64"}]},
                    "index": {"type": "integer"},
                    "chunk": {
                        "type": "object",
                        "required": ["index", "start", "end"],
                        "properties": {name: {"type": "integer"} for name in ("index", "start", "end")},
                    },
                },
            },
        },
        "model": {"type": "string"},
        "usage": {
            "type": "object",
            "required": ["prompt_tokens", "total_tokens"],
            "properties": {"prompt_tokens": {"type": "integer"}, "total_tokens": {"type": "integer"}},
        },
    },
}
USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"],
    "properties": {
        "prompt_tokens": {"type": "integer"},
        "completion_tokens": {"type": "integer"},
        "total_tokens": {"type": "integer"},
        "prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": {"type": "integer"}}},
    },
}


def _generated(kind: str, **choice: Any) -> dict[str, Any]:
    properties = {
        "index": {"type": "integer"},
        "logprobs": {"type": "object", "nullable": True},
        "finish_reason": {"type": "string", "enum": ["stop", "length"]},
        "stop_reason": {"anyOf": [{"type": "string"}, {"type": "integer"}], "nullable": True},
    } | choice
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"type": "string", "enum": [kind]},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {"type": "array", "items": {"type": "object", "required": list(properties), "properties": properties}},
            "usage": USAGE,
        },
    }


COMPLETION = _generated("text_completion", text={"type": "string"})
CHAT = _generated(
    "chat.completion",
    message={
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"type": "string", "enum": ["assistant"]}, "content": {"type": "string"}},
    },
)
_VALUE = {"anyOf": [{"type": "string"}, {"type": "boolean"}]}


def _decided(kind: str, **fields: Any) -> dict[str, Any]:
    properties = {"type": {"type": "string", "enum": [kind]}, "name": {"type": "string", "nullable": True}} | fields
    return {"type": "object", "required": list(properties), "properties": properties}


def _probabilities(**fields: Any) -> dict[str, Any]:
    properties = fields | {"probability": {"type": "number"}}
    return {"type": "array", "items": {"type": "object", "required": list(properties), "properties": properties}}


DECISIONS = {
    "type": "object",
    "required": ["model", "answers", "usage"],
    "properties": {
        "model": {"type": "string"},
        "answers": {
            "type": "array",
            "items": {
                "anyOf": [
                    _decided("predicate", probability={"type": "number"}),
                    _decided("choice", choice=_VALUE, probabilities=_probabilities(value=_VALUE), confidence={"type": "number"}),
                    _decided(
                        "score",
                        score={"type": "number"},
                        probabilities=_probabilities(value={"type": "integer"}, label={"type": "string"}),
                        confidence={"type": "number"},
                    ),
                ]
            },
        },
        "usage": {
            "type": "object",
            "required": ["input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"],
            "properties": {
                "input_tokens": {"type": "integer"},
                "input_tokens_details": {"type": "object"},
                "output_tokens": {"type": "integer"},
                "output_tokens_details": {"type": "object"},
                "total_tokens": {"type": "integer"},
            },
        },
    },
}
TOKENS = {
    "type": "array",
    "items": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["id", "text", "special", "start", "stop"],
            "properties": {
                "id": {"type": "integer"},
                "text": {"type": "string"},
                "special": {"type": "boolean"},
                "start": {"type": "integer", "nullable": True},
                "stop": {"type": "integer", "nullable": True},
            },
        },
    },
}
PROMPT_TOKENS = {
    "type": "object",
    "required": ["count", "max_model_len", "tokens", "token_strs"],
    "properties": {
        "count": {"type": "integer"},
        "max_model_len": {"type": "integer"},
        "tokens": {"type": "array", "items": {"type": "integer"}},
        "token_strs": {"type": "array", "nullable": True, "items": {"type": "string", "nullable": True}},
    },
}
TOKENIZED = {"anyOf": [TOKENS, PROMPT_TOKENS]}
PROMPT = {"type": "object", "required": ["prompt"], "properties": {"prompt": {"type": "string"}}}
TOKENIZER_INFO = {
    "type": "object",
    "required": ["tokenizer_class", "bos_token", "eos_token", "pad_token", "chat_template"],
    "properties": {
        "tokenizer_class": {"type": "string"},
        **{name: {"type": "string", "nullable": True} for name in ("bos_token", "eos_token", "pad_token", "chat_template")},
    },
}
INFO = {
    "type": "object",
    "required": ["model_id", "model_type", "max_input_length", "max_client_batch_size"],
    "properties": {
        "model_id": {"type": "string"},
        "model_sha": {"type": "string", "nullable": True},
        "model_dtype": {"type": "string"},
        "dtype_closeness": {
            "type": "object",
            "nullable": True,
            "properties": {
                "model": {"type": "string"},
                "mean_cosine": {"type": "number"},
                "top_10_overlap": {"type": "number"},
            },
        },
        "served_model_name": {"type": "string"},
        "model_type": {"type": "object"},
        "max_concurrent_requests": {"type": "integer"},
        "max_input_length": {"type": "integer"},
        "max_batch_tokens": {"type": "integer"},
        "max_client_batch_size": {"type": "integer"},
        "auto_truncate": {"type": "boolean"},
        "tokenization_workers": {"type": "integer"},
        "version": {"type": "string"},
        "pools": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "node_class", "dtypes", "revisions"],
                "properties": {
                    "name": {"type": "string"},
                    "node_class": {"type": "string"},
                    "dtypes": {"type": "array", "items": {"type": "string"}},
                    "revisions": {"type": "array", "items": {"type": "string"}},
                },
            },
        },
    },
}
MODELS = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {
        "object": {"type": "string", "enum": ["list"]},
        "data": {
            "type": "array",
            "items": {"type": "object", "required": ["id", "object", "created", "owned_by"]},
        },
    },
}
COHERE_EMBEDDINGS = {
    "type": "object",
    "required": ["response_type", "id", "embeddings", "meta"],
    "properties": {
        "response_type": {"type": "string", "enum": ["embeddings_floats", "embeddings_by_type"]},
        "id": {"type": "string"},
        "embeddings": {"anyOf": [VECTORS, {"type": "object"}]},
        "texts": {"type": "array", "items": {"type": "string"}},
        "meta": {"type": "object"},
    },
}

CHUNKS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["start", "end", "embedding"],
        "properties": {"start": {"type": "integer"}, "end": {"type": "integer"}, "embedding": FLOATS},
    },
}
SPARSE = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["index", "value"],
        "properties": {"index": {"type": "integer"}, "value": {"type": "number"}},
    },
}
EMBEDDED = {"anyOf": [VECTORS, {"type": "array", "items": CHUNKS}]}
SPARSE_LIST = {"type": "array", "items": SPARSE}
TOKEN_VECTORS = {"type": "array", "items": VECTORS}
HYBRID = {
    "type": "array",
    "items": {"type": "object", "properties": {"dense": FLOATS, "sparse": SPARSE, "colbert": VECTORS}},
}
RANKS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["index", "score"],
        "properties": {"index": {"type": "integer"}, "score": {"type": "number"}, "text": {"type": "string"}},
    },
}
COHERE_RANKS = {
    "type": "object",
    "required": ["id", "results"],
    "properties": {
        "id": {"type": "string"},
        "model": {"type": "string"},
        "results": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["index", "relevance_score"],
                "properties": {
                    "index": {"type": "integer"},
                    "relevance_score": {"type": "number"},
                    "document": {"type": "object", "properties": {"text": {"type": "string"}}},
                },
            },
        },
        "usage": {"type": "object"},
        "meta": {"type": "object"},
    },
}
PREDICTIONS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["score", "label"],
        "properties": {"score": {"type": "number"}, "label": {"type": "string"}},
    },
}
PREDICTED = {"anyOf": [PREDICTIONS, {"type": "array", "items": PREDICTIONS}]}
ANY_TASK = {"anyOf": [EMBEDDED, FLOATS, SPARSE_LIST, PREDICTED, RANKS]}

TEXTS = {"type": "array", "items": {"type": "string"}}
RERANKED = {"anyOf": [RANKS, COHERE_RANKS]}
VERTEX = {"type": "object", "required": ["predictions"], "properties": {"predictions": {"type": "array", "items": {}}}}
