"""The task of a job: the options in the API's form, and the kind of result that the model gives."""

from dataclasses import dataclass
from typing import Literal

from engine.options import InputType
from serve_app.compute.quantize import OutputDtype
from serve_app.corpus.files import CorpusError

# The kinds of results. They are also the names of the column with the results.
Kind = Literal["embedding", "score", "answer"]


@dataclass(frozen=True, slots=True)
class Task:
    """`prompt`, `prompt_name` and `input_type` choose the prompt before each text. `max_tokens` limits an answer."""

    dimensions: int | None = None
    output_dtype: OutputDtype = "float"
    prompt: str | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None
    max_tokens: int = 256


# The options that a job does not use, by its kind of result.
_UNUSED: dict[Kind, tuple[str, ...]] = {
    "embedding": (),
    "score": ("dimensions", "output_dtype", "prompt", "prompt_name", "input_type"),
    "answer": ("dimensions", "output_dtype", "prompt_name", "input_type"),
}


def check_options(task: Task, kind: Kind) -> None:
    """Raises: CorpusError for an option that a job with this kind of result does not use."""
    usual = Task()
    for name in _UNUSED[kind]:
        if getattr(task, name) != getattr(usual, name):
            raise CorpusError(f"--{name.replace('_', '-')} is not used for the result {kind!r}; leave it out")


def kind_of(model: str, tasks: set[str], ranks: bool) -> Kind:
    """The kind of result of a model with these tasks: a vector if the model can embed. `ranks`: there is a column with queries.

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
    raise CorpusError(f"{model} is a classifier; only embedding models, rerankers and generation models are supported")
