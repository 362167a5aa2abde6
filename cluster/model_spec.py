"""The specification of one model: its folder or Hub id, the name that clients use, and its options.

models.yaml and the command line give a `ModelSpec`. The plan writes the whole spec into the Serve config, and gateway and
replica read it there. To add an option of a model, add a field to `ModelOptions` and a parameter to `Engine.load`.

This module imports neither torch nor Ray.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from cluster.numbers import MOST_TOKENS, Int
from engine.model.config import Backend, DtypeName, KvCacheDtype, Pooling

IDLE_PROMPTS = (
    "{model} has prompts ({names}) that a text gets only if its request asks for one with prompt_name or input_type; "
    "choose a prompt for all other texts with default_prompt_name, or none with an empty default_prompt"
)
_DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}


def _dtype(value: Any) -> Any:
    return _DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value


def _pooling(value: Any) -> Any:
    return value.replace("-", "_") if isinstance(value, str) else value


Dtype = Annotated[Literal["auto", DtypeName], BeforeValidator(_dtype)]


class ModelOptions(BaseModel):
    """The options of one model. The fields are keyword arguments of `Engine.load`.

    The field descriptions are the help texts of the command line.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Dtype = Field(
        "auto",
        description="auto, float32, bfloat16 or float16; auto is bfloat16 if the chip supports it; "
        "float8 or int8 for layers in 8 bits, int4 for layers in 4 bits",
    )
    pooling: Annotated[Pooling | None, BeforeValidator(_pooling)] = Field(
        None, description=f"{', '.join(get_args(Pooling))} [default: what the model's folder says]"
    )
    backend: Backend = Field(
        "emberforge", description="emberforge, or transformers for architectures that our engine does not have (slower)"
    )
    trust_remote_code: bool = Field(
        False,
        description="With backend transformers, run the code in the model's folder: in replicas, gateways and `emberforge plan`",
    )
    default_prompt_name: str | None = Field(
        None,
        description="Name of the model's prompt for texts whose request names no prompt [default: what the model's folder says]",
    )
    default_prompt: str | None = Field(
        None,
        description="The text of that prompt, instead of its name; empty for no prompt [default: what the model's folder says]",
    )
    max_batch_tokens: Int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="The most tokens of a batch [default: measured on a GPU, 2048 on a CPU]"
    )
    max_input_tokens: Int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="The most tokens of an input [default: the model's own limit]"
    )
    cache_tokens: Int | None = Field(
        None,
        ge=1,
        le=MOST_TOKENS,
        description="Size of the KV cache in tokens, for a generation model [default: by the free memory]",
    )
    kv_cache_dtype: KvCacheDtype = Field(
        "auto",
        description="auto, fp8 or int8; fp8 (also fp8_e4m3) and int8 keep keys and values in 8 bits, for twice the tokens",
    )
    speculate: bool = Field(
        True,
        description="Speculative decoding: propose tokens from repeated text, verify them in one pass; the answer is the same",
    )

    @model_validator(mode="after")
    def _prompts_agree(self) -> "ModelOptions":
        if self.default_prompt_name is not None and self.default_prompt is not None:
            raise ValueError(
                "default_prompt_name and default_prompt are both set, but a text gets one prompt; set only one of them"
            )
        return self

    @model_validator(mode="after")
    def _code_has_a_backend(self) -> "ModelOptions":
        if self.trust_remote_code and self.backend != "transformers":
            raise ValueError("trust_remote_code needs backend transformers: our own engine never runs a model's code")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The options by name, as `Engine.load` takes them."""
        return {name: getattr(self, name) for name in ModelOptions.model_fields}


class ModelSpec(ModelOptions):
    """One model with its options."""

    name: str = Field(min_length=1)  # clients send this name as `model`
    model: str = Field(min_length=1)  # a folder, a Hub id, or the embedded model
    devices: tuple[str, ...] = ()  # devices that share the layers, by the replica's names; empty: the replica's first device
    revision: str | None = None  # of the model's files (`engine/revision.py`); a process with other files does not start


def pool_name(name: str) -> str:
    """The part of a model's name that goes into a path: the last component, with dashes for unusual characters."""
    last = name.rstrip("/").rsplit("/", 1)[-1]
    return "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in last) or "model"
