"""The forms of errors: the form of each path, and the JSON of each form.

The API answers errors in the form of the client's SDK: TEI's, OpenAI's or Cohere's. HAProxy refuses requests in the same
forms before they reach the API. Both use this module. It imports only the standard library, because HAProxy's wrapper
starts at each change of HAProxy's configuration.
"""

from typing import Any, Literal, NamedTuple

Form = Literal["tei", "openai", "cohere"]


class PathRule(NamedTuple):
    """A rule that gives a path its form."""

    form: Form
    match: Literal["end", "sub"]  # like HAProxy's `-m`: a pattern is the end of the path, or any part of the path
    patterns: tuple[str, ...]

    def matches(self, path: str) -> bool:
        if self.match == "end":
            return path.endswith(self.patterns)
        return any(pattern in path for pattern in self.patterns)


# The first rule that matches a path decides. Patterns do not include the start of a path, because an application may have a
# prefix. Paths that the API does not serve have a form too, because an SDK reads the 404.
PATH_RULES = (
    PathRule("openai", "sub", ("/v1/models/",)),  # first, because a model's name may contain any of the other patterns
    PathRule("cohere", "end", ("/v1/embed", "/v1/rerank")),
    PathRule("cohere", "sub", ("/v2/",)),
    PathRule("openai", "sub", ("/v1/",)),
    PathRule("openai", "end", ("/embeddings", "/detokenize", "/tokenizer_info")),
)


def form_of(path: str) -> Form:
    """The form of errors at `path`. Without a rule it is TEI's form."""
    return next((rule.form for rule in PATH_RULES if rule.matches(path)), "tei")


def error_body(form: Form, status: int, error_type: str, message: str, param: str | None = None) -> dict[str, Any]:
    """The JSON of an error. `param` is the wrong field.

    OpenAI's form has OpenAI's envelope for the openai SDK, and TEI's fields for scripts that were written for TEI.
    """
    if form == "cohere":
        return {"message": message}
    if form == "openai":
        flat = {"message": message, "type": error_type, "code": status}
        return {"error": flat | {"param": param}} | flat
    return {"error": message, "error_type": error_type}
