"""What to compute of each row, in the API's words, and which of a model's tasks that is."""

from dataclasses import dataclass
from typing import Literal

from engine.options import InputType
from serve_app.compute.quantize import OutputDtype
from serve_app.corpus.files import CorpusError

# The name of the column with the results.
Kind = Literal["embedding", "score", "answer"]


@dataclass(frozen=True, slots=True)
class Task:
    """`prompt`, `prompt_name` and `input_type` put a text before each text. `max_tokens` is of an answer."""

    dimensions: int | None = None
    output_dtype: OutputDtype = "float"
    prompt: str | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None
    max_tokens: int = 256


def kind_of(model: str, tasks: set[str], ranks: bool) -> Kind:
    """What a model with these tasks gives: a vector if it can. `ranks`: there is a column with queries.

    Raises: CorpusError for a model that does not fit.
    """
    if ranks:
        if "reranker" not in tasks:
            raise CorpusError(f"{model} is not a reranker; leave out --rerank")
        return "score"
    if "embedding" in tasks:
        return "embedding"
    if "generation" in tasks:
        return "answer"
    if "reranker" in tasks:
        raise CorpusError(f"{model} is a reranker: name the column with the queries, --rerank COLUMN")
    raise CorpusError(f"{model} is a classifier; only embedding models, rerankers and models that generate text are supported")
