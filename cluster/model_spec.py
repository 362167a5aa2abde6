"""One model as the operator specifies it: which model it is, the name that clients use, and the options it is loaded with.

models.yaml and the command line give a `ModelSpec`. The plan writes the whole spec into the Serve config, and gateway and
replica read it there. A new option of one model is a field of `ModelOptions` and a parameter of `Engine.load`.

This module imports neither torch nor Ray.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from engine.model.config import Backend, DtypeName, Pooling

IDLE_PROMPTS = (
    "{model} has prompts ({names}) that a text gets only where its request says so, with prompt_name or input_type; "
    "choose one for all other texts with default_prompt_name, or none with an empty default_prompt"
)
_DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}


def _dtype(value: Any) -> Any:
    return _DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value


def _pooling(value: Any) -> Any:
    return value.replace("-", "_") if isinstance(value, str) else value


Dtype = Annotated[Literal["auto", DtypeName], BeforeValidator(_dtype)]


class ModelOptions(BaseModel):
    """The options that one model is loaded with. The fields are keyword arguments of `Engine.load`.

    The field descriptions are the help texts of the command line.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Dtype = Field(
        "auto",
        description="auto, float32, bfloat16 or float16; auto is bfloat16 where the chip has it; "
        "float8 or int8 for layers in 8 bits, int4 in 4 bits",
    )
    pooling: Annotated[Pooling | None, BeforeValidator(_pooling)] = Field(
        None, description=f"{', '.join(get_args(Pooling))} [default: what the model's folder says]"
    )
    backend: Backend = Field(
        "emberforge", description="Whose network runs: emberforge, or transformers for architectures we do not have, slower"
    )
    trust_remote_code: bool = Field(False, description="With backend transformers, run code that comes with a model")
    default_prompt_name: str | None = Field(
        None, description="The model's prompt for texts whose request asks for none [default: what the model's folder says]"
    )
    default_prompt: str | None = Field(
        None, description="The same, as a text; empty for none [default: what the model's folder says]"
    )
    max_batch_tokens: int | None = Field(
        None, ge=1, description="Token budget of one forward pass [default: measured on a GPU, 2048 on a CPU]"
    )
    max_input_tokens: int | None = Field(None, ge=1, description="Tokens of the longest input [default: the model's own limit]")
    cache_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens that the cache of a model which generates holds, for all of its work [default: by the free memory]",
    )
    speculate: bool = Field(
        True, description="Generate several tokens of an answer in one pass where its own text foretells them; the answer stays"
    )

    @model_validator(mode="after")
    def _prompts_agree(self) -> "ModelOptions":
        if self.default_prompt_name is not None and self.default_prompt is not None:
            raise ValueError("default_prompt_name and default_prompt are both set; a text gets one prompt, leave one out")
        return self

    @model_validator(mode="after")
    def _code_has_a_backend(self) -> "ModelOptions":
        if self.trust_remote_code and self.backend != "transformers":
            raise ValueError("trust_remote_code has no effect without backend transformers: our engine never runs a model's code")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The options by name, as `Engine.load` takes them."""
        return {name: getattr(self, name) for name in ModelOptions.model_fields}


class ModelSpec(ModelOptions):
    """One model with its options."""

    name: str = Field(min_length=1)  # clients send this name as `model`
    model: str = Field(min_length=1)  # a folder, a Hub id, or the embedded model
    devices: tuple[str, ...] = ()  # that share the model's layers, as a replica names them; none: the replica's first
    revision: str | None = None  # of the model's files (`engine/revision.py`); a process that finds another one does not start


def pool_name(name: str) -> str:
    """The part of a model's name that goes into a path: the last component, with dashes for unusual characters."""
    last = name.rstrip("/").rsplit("/", 1)[-1]
    return "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in last) or "model"
