"""What the engine knows of a model: one frozen `ModelConfig`, and how its keys are read from Hugging Face's config.json.

Every key that changes a vector is either honoured or refused by name: a model that loads gives the vectors its
authors meant. HF's two spellings of a key (`rope_parameters`/`rope_theta`, `dtype`/`torch_dtype`) are read here
and nowhere else.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.errors import InvalidInput, ModelError

Pooling = Literal["mean", "cls", "last_token", "max", "mean_sqrt_len", "weighted_mean", "splade"]
# Poolings that read one token of a sequence; the others read all.
ONE_TOKEN: tuple[Pooling, ...] = ("cls", "last_token")
Task = Literal["embedding", "classifier", "reranker"]
# What a pass can give besides one vector per sequence.
OutputName = Literal["tokens", "sparse", "colbert", "chunks"]
DtypeName = Literal["float32", "bfloat16", "float16", "float8", "int8"]
# Whose network runs: ours, or transformers' for architectures we do not have.
Backend = Literal["emberforge", "transformers"]
DenseActivation = Literal["Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"]


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A linear layer between pooling and normalisation; `folder` holds its weights."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: DenseActivation

    @property
    def num_parameters(self) -> int:
        return self.out_features * (self.in_features + self.bias)


@dataclass(frozen=True, slots=True)
class SpladeConfig:
    """The masked-LM head that SPLADE pools, and how: log(1 + relu(x)), or with `log_twice` the logarithm of that again."""

    tied: bool  # its decoder is the words' table
    log_twice: bool = False
    dense_bias: bool = True
    norm_bias: bool = True
    decoder_bias: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """What makes logits of a pooled vector: out(norm(activation(dense(x)))), each part by its name in the checkpoint.

    A language model that answers with a word has `tokens`, (yes, no), and in `out` the matrix that gives a word's logit:
    its one logit is yes's less no's, or yes's alone where no is None.
    """

    out: str = "classifier"
    out_bias: bool = True
    dense: str | None = None  # none before `out`
    dense_bias: bool = True
    activation: DenseActivation = "Tanh"
    norm: str | None = None
    norm_bias: bool = True
    pooling: Pooling = "cls"
    tokens: tuple[int, int | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the forward pass and the tokenizer need to know of every model; a family adds what is its own.

    `max_input_length` counts tokens, special ones included. `prompts` maps a name to the text put in front;
    `default_prompt` is put in front where a request asks for none, None where nobody has chosen one. Classifiers and
    rerankers have `labels`, one for each logit, and a `head`. `instruction` is the default one of a reranker whose pairs
    go into Qwen3-Reranker's template; None where the tokenizer puts pairs together. `padding_id`: tokens of it at the end
    of an input are left out, as transformers does before it takes the last token's logits. `splade` is there with that
    pooling; `lexical` and `colbert_size` say which of BGE-M3's layers lie beside the weights, and how wide the second is.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    causal: bool
    pooling: Pooling
    dense: tuple[DenseConfig, ...] = ()
    type_vocab_size: int = 0  # none for a family without token types
    labels: tuple[str, ...] = ()
    multi_label: bool = False  # each label holds or not by itself
    head: HeadConfig | None = None
    instruction: str | None = None
    padding_id: int | None = None
    splade: SpladeConfig | None = None
    lexical: bool = False
    colbert_size: int | None = None
    max_input_length: int
    lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict, hash=False)
    default_prompt: str | None = None
    stored_dtype: str = "float32"

    @property
    def embedding_size(self) -> int:
        """Dimensions of a vector, or the number of a classifier's logits; `hidden_size` are those of a token."""
        if self.labels:
            return len(self.labels)
        if self.splade is not None:
            return self.vocab_size
        return self.dense[-1].out_features if self.dense else self.hidden_size

    @property
    def task(self) -> Task:
        if not self.labels:
            return "embedding"
        return "reranker" if len(self.labels) == 1 else "classifier"

    @property
    def tells_segments(self) -> bool:
        """Whether the second text of a pair has a token type of its own. What only embeds never sees pairs."""
        return bool(self.labels) and self.type_vocab_size > 1

    @property
    def outputs(self) -> tuple[OutputName, ...]:
        """What a pass can give besides vectors. Chunks are pooled like texts, which says something of a mean of tokens, and
        nothing where the model was trained to put a whole text into one of them."""
        if self.splade is not None:
            return ("sparse",)
        there: dict[OutputName, bool] = {
            "tokens": not self.labels,
            "sparse": self.lexical,
            "colbert": self.colbert_size is not None,
            "chunks": not self.labels and self.pooling not in ONE_TOKEN,
        }
        return tuple(name for name, given in there.items() if given)

    @property
    def idle_prompts(self) -> tuple[str, ...]:
        """The prompts that no request gets unless it asks for one, because nobody has chosen a default."""
        return tuple(name for name, text in self.prompts.items() if text) if self.default_prompt is None else ()


def named_prompt(prompts: dict[str, str], name: str) -> str:
    """The text of a prompt. TEI's wording, `default-prompt-name` included: tei-client reads the list of prompts out of it.

    Raises: InvalidInput with the names there are.
    """
    if not prompts:
        raise InvalidInput(
            f"`default-prompt-name` is set to `{name}` but no prompts were found in the Sentence Transformers configuration"
        )
    if name not in prompts:
        names = ", ".join(f'"{known}"' for known in prompts)
        raise InvalidInput(
            f"`default-prompt-name` is set to `{name}` but it was not found in the Sentence Transformers prompts. "
            f"Available prompts: [{names}]"
        )
    return prompts[name]


class Keys:
    """One config file; every failed look-up names the file and the key."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.values = path, values

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def number(self, key: str, default: float | None = None) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ModelError(f"{self.path}: {key} is {value!r}, expected a positive number")
        return value

    def refuse(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """Stop when a key that changes the vectors holds something other than `allowed` (absent is fine)."""
        if key in self.values and self.values[key] not in allowed:
            raise ModelError(f"{self.path}: {key} = {self.values[key]!r} is not supported ({why})")

    def divides(self, total: str, parts: str) -> None:
        """Stop where `total` is not a multiple of `parts`."""
        if self.number(total) % self.number(parts):
            raise ModelError(f"{self.path}: {total} = {self.get(total)} is not a multiple of {parts} = {self.get(parts)}")


def encoder_shape(keys: Keys, eps_key: str = "layer_norm_eps", eps: float = 1e-12) -> dict[str, Any]:
    """What most encoders' config.json say in the same words; `eps` where it does not say."""
    keys.divides("hidden_size", "num_attention_heads")
    hidden_size, heads = keys.number("hidden_size"), keys.number("num_attention_heads")
    return {
        "vocab_size": keys.number("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": keys.number("intermediate_size"),
        "n_layers": keys.number("num_hidden_layers"),
        "n_heads": heads,
        "n_kv_heads": heads,
        "head_dim": hidden_size // heads,
        "norm_eps": keys.number(eps_key, eps),
        "max_position_embeddings": keys.number("max_position_embeddings"),
        "causal": False,
    }


def rope_theta(keys: Keys) -> float:
    """Plain RoPE's base, from transformers 5's `rope_parameters` or the Hub's flat keys."""
    rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{keys.path}: RoPE of type {kind!r} ({rope}) is not supported (only plain, full-width RoPE)")
    theta = rope.get("rope_theta", keys.get("rope_theta"))
    if not isinstance(theta, int | float) or theta <= 0:
        raise ModelError(f"{keys.path}: rope_theta is {theta!r}, expected a positive number")
    return float(theta)


def is_causal(keys: Keys) -> bool:
    """A decoder is causal unless the checkpoint says otherwise, in either of the two spellings in use."""
    if keys.get("use_bidirectional_attention"):
        return False
    return keys.get("is_causal", True) is not False


_ACTIVATIONS: dict[str, DenseActivation] = {"gelu": "GELU", "relu": "ReLU", "silu": "SiLU", "swish": "SiLU", "tanh": "Tanh"}


def head_activation(keys: Keys, key: str, default: str) -> DenseActivation:
    """A head's activation, by transformers' name for it."""
    name = keys.get(key) or default
    if name not in _ACTIVATIONS:
        raise ModelError(f"{keys.path}: {key} = {name!r} is not supported (one of {', '.join(_ACTIVATIONS)})")
    return _ACTIVATIONS[name]


def read_labels(keys: Keys) -> tuple[str, ...]:
    """`id2label` in the order of its indices, or as transformers has it: LABEL_0 and so on, two where no number is given."""
    names, count = keys.get("id2label"), keys.get("num_labels")
    if names is None:
        return tuple(f"LABEL_{index}" for index in range(keys.number("num_labels", 2)))
    if not isinstance(names, dict) or sorted(map(str, names)) != sorted(map(str, range(len(names)))) or not names:
        raise ModelError(f"{keys.path}: id2label {names!r} does not name every label from 0 up")
    if count is not None and count != len(names):
        raise ModelError(f"{keys.path}: id2label names {len(names)} labels, num_labels is {count!r}")
    by_index = {int(index): str(name) for index, name in names.items()}
    return tuple(by_index[index] for index in range(len(by_index)))
