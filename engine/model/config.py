"""`ModelConfig`: the engine's description of one model. Families derive from it; `engine/model/keys.py` reads its fields."""

from dataclasses import dataclass, field, replace
from typing import Literal

from engine.errors import InvalidInput
from engine.model.quantized.scheme import Quantization

# Warm-up tries token budgets up to this one.
MOST_BATCH_TOKENS = 16384

Pooling = Literal["mean", "cls", "last_token", "max", "mean_sqrt_len", "weighted_mean", "splade"]
# Poolings that read one token of a sequence. The others read all tokens.
ONE_TOKEN: tuple[Pooling, ...] = ("cls", "last_token")
Task = Literal["embedding", "classifier", "reranker", "generation"]
# The results that a pass can give besides one vector per sequence.
OutputName = Literal["tokens", "sparse", "colbert", "chunks"]
# The dtype of keys and values, by vLLM's names. auto: the model's dtype. fp8: e4m3 numbers with a power of two for
# each head. int8: whole numbers with such a power.
KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3", "int8"]
DtypeName = Literal["float32", "bfloat16", "float16", "float8", "int8", "int4"]
# The implementation of the network: ours, or transformers' for architectures that we do not have.
Backend = Literal["emberforge", "transformers"]
DenseActivation = Literal["Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"]


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A linear layer between pooling and normalisation. `folder` holds the weights."""

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
    """The masked-LM head that SPLADE pools. A weight is log(1 + relu(logit)); `log_twice` takes log(1 + x) of it again."""

    tied: bool  # the decoder is the table of words
    log_twice: bool = False
    dense_bias: bool = True
    norm_bias: bool = True
    decoder_bias: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A classifier's head: the logits are out(norm(activation(dense(pooled)))). Each part has its name in the checkpoint."""

    out: str = "classifier"
    out_bias: bool = True
    dense: str | None = None  # None: the head has no such part
    dense_bias: bool = True
    activation: DenseActivation = "Tanh"
    norm: str | None = None  # None: the head has no such part
    norm_bias: bool = True
    pooling: Pooling = "cls"


@dataclass(frozen=True, slots=True, kw_only=True)
class WordHeadConfig:
    """The head of a reranker that is a language model. Its one logit is the logit of `yes` minus the logit of `no`."""

    tied: bool  # the rows of the logits are the table of words; otherwise they are the checkpoint's lm_head
    yes: int  # the token id of the word
    no: int | None  # None: the logit of `yes` alone

    @property
    def pooling(self) -> Pooling:
        return "last_token"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """The head of a generation model, and its authors' settings for generation. None: there is no such setting."""

    tied: bool  # the rows of the logits are the table of words; otherwise they are the checkpoint's lm_head
    eos_ids: tuple[int, ...] = ()  # tokens that end an answer
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    embeds: bool = False  # the operator has named a pooling, so the model also gives vectors
    cache_dtype: Literal["auto", "fp8", "int8"] = "auto"  # of keys and values; auto: the dtype that the model computes in

    def ended_by(self, eos_id: int | None, vocab_size: int) -> "GenerationConfig":
        """The config with the tokenizer's token for the end. Ids beyond the vocabulary are left out: no answer ends with them.

        A chat model may have its token for the end of a turn only in tokenizer_config.json.
        """
        ids = self.eos_ids if eos_id is None or eos_id in self.eos_ids else (*self.eos_ids, eos_id)
        return replace(self, eos_ids=tuple(each for each in ids if each < vocab_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """All facts about a model that the forward pass and the tokenizer use. A family adds its own fields.

    * `max_input_length` counts tokens, including special ones.
    * `prompts` maps a name to the text in front of an input. `default_prompt` is the text for requests without a prompt. It is
      None if neither the operator nor the model chooses one.
    * Classifiers and rerankers have a `head`, and in `labels` a name for each logit.
    * `instruction` is the default instruction of a reranker with Qwen3-Reranker's template. It is None if the tokenizer joins
      the texts of a pair.
    * Tokens of `padding_id` at the end of an input are left out, as transformers leaves them out before it takes the last
      token's logits.
    * `splade` is set if pooling is SPLADE.
    * A model with `generation` gives tokens. It gives vectors, too, if `generation.embeds`.
    * `part` has the layers of one stage of a pipeline. None: the model is whole. Only decoders can be divided.
    * `lexical`: the folder has BGE-M3's layer of lexical weights. `colbert_size` is the width of its layer of ColBERT vectors.
    * `quantization` is the checkpoint's storage of matrices in 4 to 8 bits. A GPU may keep it. Otherwise the engine
      dequantises the matrices at load.
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
    type_vocab_size: int = 0  # 0 for a family without token types
    labels: tuple[str, ...] = ()
    multi_label: bool = False  # any number of labels can hold at once
    regression: bool = False  # several labels have values of their own, not probabilities
    head: HeadConfig | WordHeadConfig | None = None
    instruction: str | None = None
    padding_id: int | None = None
    splade: SpladeConfig | None = None
    generation: GenerationConfig | None = None
    part: range | None = None
    lexical: bool = False
    colbert_size: int | None = None
    max_input_length: int
    lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict, hash=False)
    default_prompt: str | None = None
    quantization: Quantization | None = None

    @property
    def layers(self) -> range:
        """The layers of this model, or of this part of the model."""
        return range(self.n_layers) if self.part is None else self.part

    @property
    def has_words(self) -> bool:
        """Whether this part of the model begins with token ids."""
        return self.layers.start == 0

    @property
    def has_end(self) -> bool:
        """Whether this part of the model ends with the final norm, and with the head if there is one."""
        return self.layers.stop == self.n_layers

    @property
    def embedding_size(self) -> int:
        """Dimensions of a vector, or the number of a classifier's logits."""
        if self.labels:
            return len(self.labels)
        if self.splade is not None:
            return self.vocab_size
        return self.dense[-1].out_features if self.dense else self.hidden_size

    @property
    def task(self) -> Task:
        if self.generation is not None:
            return "generation"
        if not self.labels:
            return "embedding"
        return "reranker" if len(self.labels) == 1 else "classifier"

    @property
    def embeds(self) -> bool:
        return not self.labels and (self.generation is None or self.generation.embeds)

    @property
    def tells_segments(self) -> bool:
        """Whether the second text of a pair has another token type than the first. An embedding model never gets pairs."""
        return bool(self.labels) and self.type_vocab_size > 1

    @property
    def outputs(self) -> tuple[OutputName, ...]:
        """The results that a pass can give besides vectors.

        Chunks are pooled like texts. The mean of a chunk's tokens describes the chunk. With one-token pooling there are no
        chunks, because the model was trained to describe a whole text in that token.
        """
        if self.splade is not None:
            return ("sparse",)
        if self.generation is not None:
            return ()
        there: dict[OutputName, bool] = {
            "tokens": not self.labels,
            "sparse": self.lexical,
            "colbert": self.colbert_size is not None,
            "chunks": not self.labels and self.pooling not in ONE_TOKEN,
        }
        return tuple(name for name, given in there.items() if given)

    @property
    def idle_prompts(self) -> tuple[str, ...]:
        """The prompts of a model without a default prompt. A request gets one of them only by its name."""
        return tuple(name for name, text in self.prompts.items() if text) if self.default_prompt is None else ()


def named_prompt(prompts: dict[str, str], name: str) -> str:
    """The text of a prompt.

    Raises: InvalidInput with all names. The wording is TEI's, because tei-client reads the list of prompts out of it.
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


def with_kv_cache_dtype(config: ModelConfig, name: KvCacheDtype) -> ModelConfig:
    """The configuration with keys and values in this dtype. A model that does not generate has no cache and stays unchanged."""
    if config.generation is None:
        return config
    return replace(config, generation=replace(config.generation, cache_dtype="fp8" if name == "fp8_e4m3" else name))
