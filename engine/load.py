"""Loads the parts of an `Engine` from a model folder: configuration, tokenizer, weights, heads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from torch import Tensor

from engine.devices import choose_device, choose_dtype, compute_dtype, current, multiplies_codes
from engine.errors import ModelError
from engine.heads.base import Outputs, VectorHead
from engine.heads.chunks import ChunkHead
from engine.heads.classifier import Head
from engine.heads.dense import Dense
from engine.heads.language import LanguageHead
from engine.heads.pool import Pool
from engine.heads.splade import Splade, SpladeEntries
from engine.heads.tokens import ColbertHead, LexicalHead, TokenHead, load_layer
from engine.hub import resolve_model
from engine.kernels.launch import is_hopper
from engine.kernels.tiles import tiling
from engine.model import footprint as memory
from engine.model.base import Model
from engine.model.config import Backend, DenseConfig, GenerationConfig, HeadConfig, ModelConfig, Pooling, WordHeadConfig
from engine.model.decoder import DecoderConfig
from engine.model.families import Transformers, family_of
from engine.model.folder import load_model_config, read_no_words
from engine.model.weights import Checkpoint, Kept
from engine.run import reserve
from engine.run.network import Network
from engine.run.pack import BatchPacker
from engine.run.stages import Stage
from engine.text.prompts import Prompts
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on its device, and the model's values for packing."""

    tokenizer: Tokenizer
    network: Network
    packer: BatchPacker
    prompts: Prompts | None = None  # of a generation model
    earlier: tuple[Model, ...] = ()  # the stages before the last one, if the model is on several devices


def read_config(
    model: str,
    pooling: Pooling | None,
    default_prompt_name: str | None,
    default_prompt: str | None,
    max_input_tokens: int | None,
    backend: Backend,
    trust_remote_code: bool,
    on_download: Callable[[float], None] | None = None,
) -> tuple[Path, ModelConfig]:
    """A model's folder and its configuration. Raises: ModelError with the file and what to do."""
    folder = resolve_model(model, code=trust_remote_code, on_progress=on_download)
    config = load_model_config(
        folder,
        pooling,
        default_prompt_name=default_prompt_name,
        default_prompt=default_prompt,
        max_input_tokens=max_input_tokens,
        backend=backend,
        trust_remote_code=trust_remote_code,
    )
    return folder, config


def choose(config: ModelConfig, dtype: str, device: str) -> tuple[torch.dtype, torch.device]:
    """Chooses a model's dtype and device, and sets the device up. Raises: ModelError for a dtype that the device lacks."""
    where = choose_device(device)
    chosen = choose_dtype(dtype, where, family_of(config).overflows_float16)
    if chosen.itemsize == 1 and family_of(config) is Transformers:
        raise ModelError(f"{dtype} is for the layers of our own networks; leave out --backend transformers, or use bfloat16")
    _prepare(where)
    return chosen, where


def choose_all(config: ModelConfig, dtype: str, devices: Sequence[str]) -> tuple[torch.dtype, list[torch.device]]:
    """Like `choose`, for several devices. Raises: as `choose`; ModelError for devices with different default dtypes."""
    chosen = [choose(config, dtype, device) for device in devices]
    dtypes = {each for each, _ in chosen}
    if len(dtypes) > 1:
        raise ModelError(f"devices {', '.join(devices)} compute in different dtypes by default; give a dtype")
    return chosen[0][0], [device for _, device in chosen]


def _prepare(device: torch.device) -> None:
    """Sets up torch's memory and arithmetic for this process."""
    if device.type == "cpu":
        reserve.keep_freed_memory()
        return
    torch.cuda.set_device(device)
    reserve.grow_in_place(device)
    # Otherwise the parts of split products would be summed in bf16. Everything else accumulates in fp32.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _has_room_for_copies(num_bytes: int) -> bool:
    """Whether a CPU may keep a second copy of the weights, to decode faster. Half of the memory must stay free."""
    return 4 * num_bytes <= psutil.virtual_memory().available


def load(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[float], None] | None = None,
    earlier: Sequence[Stage] = (),
) -> Loaded:
    """Loads tokenizer, weights and heads.

    Args:
        config, device: those of the last stage, if the model is on several devices.
        on_progress: as in `Checkpoint`.
        earlier: the stages before it. If instead `config` is the first stage's, the later ones are processes of their own.
    Raises: ModelError with the file and what to do.
    """
    tokenizer = Tokenizer.load(folder, config)
    family, wide = family_of(config), compute_dtype(dtype)
    with Checkpoint(folder, device, dtype, on_progress, config.quantization) as checkpoint:
        _configure(checkpoint, config, dtype)
        num_bytes = checkpoint.num_bytes + memory.dense_parameters(config) * wide.itemsize
        if config.part is None:  # otherwise the cut has compared each stage with its device
            reserve.check_fits(num_bytes - memory.bytes_saved(config, dtype, multiplies_codes(device)), device, str(folder))
        models = [_load_stage(stage, checkpoint) for stage in earlier]
        model = family(config, checkpoint)
        first = models[0] if models else model
        head = [] if config.head is None else [_load_head(config, config.head, first, checkpoint)]
        vector_head: VectorHead
        if config.splade is not None and family.masked_lm is not None:
            assert isinstance(model.words, Tensor), _IN_CODES
            vector_head = Splade(config, checkpoint, family.masked_lm, model.words)
        else:
            dense = [_load_dense(each, folder, device, wide) for each in config.dense]
            vector_head = Pool(config.pooling, [*dense, *head])
        language_head = None
        if config.generation is not None:
            language_head = _load_language_head(config, config.generation, first, checkpoint)
        checkpoint.finish(model.unused, _elsewhere(config) if config.has_words else ())
    outputs = _load_outputs(folder, config, tokenizer, vector_head, device, wide)
    prompts = None if config.generation is None else Prompts.of(folder, tokenizer.shared)
    parts = assemble(config, model, vector_head, outputs, language_head, tokenizer, prompts, wide, device)
    return replace(parts, earlier=tuple(models))


def load_layers(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Model:
    """Loads the layers of `config.part`, which is not the first stage. Raises: ModelError with the file and what to do."""
    with current(device), Checkpoint(folder, device, dtype, None, config.quantization) as checkpoint:
        _configure(checkpoint, config, dtype)
        return family_of(config)(config, checkpoint)


def _configure(checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype) -> None:
    if isinstance(config, DecoderConfig):
        checkpoint.leave_out_images()
    if config.generation is not None and config.generation.tied:
        checkpoint.take_words_from_head()
    checkpoint.decodes = config.generation is not None and _has_room_for_copies(checkpoint.num_bytes)
    most_bits, e4m3 = memory.most_bits_kept(config, dtype), memory.keeps_e4m3(config, dtype)

    def kept_on(device: torch.device) -> Kept:
        return Kept(most_bits if multiplies_codes(device) else 0, e4m3 and is_hopper(device))

    checkpoint.kept_on = kept_on


def _elsewhere(config: ModelConfig) -> tuple[str, ...]:
    """Patterns of the names of tensors that later stages load."""
    if config.has_end:
        return ()
    return (*(f"layers.{index}.*" for index in range(config.layers.stop, config.n_layers)), "norm.weight")


def assemble(
    config: ModelConfig,
    model: Model,
    vector_head: VectorHead,
    outputs: Outputs,
    language_head: LanguageHead | None,
    tokenizer: Tokenizer,
    prompts: Prompts | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Loaded:
    """A loaded model with its heads and its packer.

    Args:
        language_head, prompts: of a generation model.
        dtype: of everything except the layers' products.
    """
    packer = packer_of(config, model, dtype, device)
    name = f"{config.architecture} with pooling {config.pooling}"
    network = Network(name, model, vector_head, outputs, config.embedding_size, language_head)
    return Loaded(tokenizer, network, packer, prompts)


def packer_of(config: ModelConfig, model: Model, dtype: torch.dtype, device: torch.device) -> BatchPacker:
    """`dtype`: as in `assemble`."""
    heads = config.n_heads, config.n_kv_heads
    tiles = None if model.eager_only else tiling(heads, config.head_dim, dtype, device, config.causal, model.biases_scores)
    return BatchPacker(config.pooling, config.embedding_size, tiles, config.tells_segments, model.shares_prefixes)


def _load_stage(stage: Stage, checkpoint: Checkpoint) -> Model:
    with current(stage.device), checkpoint.on(stage.device) as source:
        return family_of(stage.config)(stage.config, source)


def _load_outputs(
    folder: Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    vector_head: VectorHead,
    device: torch.device,
    dtype: torch.dtype,
) -> Outputs:
    """The heads of the outputs that a request may ask for besides its vector."""
    outputs: Outputs = {"tokens": TokenHead(config.hidden_size)}
    if isinstance(vector_head, Splade):
        outputs["sparse"] = SpladeEntries()
    elif config.lexical:
        layer = load_layer(folder, "sparse_linear", config.hidden_size, device, dtype)
        outputs["sparse"] = LexicalHead(layer, tokenizer.ids(read_no_words(folder)))
    if config.colbert_size is not None:
        layer = load_layer(folder, "colbert_linear", config.hidden_size, device, dtype)
        outputs["colbert"] = ColbertHead(layer, config.colbert_size)
    if "chunks" in config.outputs:
        outputs["chunks"] = ChunkHead(vector_head)
    return outputs


def _load_dense(config: DenseConfig, folder: Path, device: torch.device, dtype: torch.dtype) -> Dense:
    with Checkpoint(folder / config.folder, device, dtype) as checkpoint:
        layer = Dense(config, checkpoint)
        checkpoint.finish(())
    return layer


# Only generation models have words in codes (`most_bits_kept`). They have neither SPLADE nor a classifier's head.
_IN_CODES = "only generation models have words in codes"


def _load_language_head(config: ModelConfig, said: GenerationConfig, first: Model, checkpoint: Checkpoint) -> LanguageHead:
    """`first`: the model that has the word embeddings. On another device, a tied head is a copy of them."""
    name, words = "lm_head.weight", first.words
    if said.tied and isinstance(words, Tensor):
        words = checkpoint.take_tied(name, words)
    elif not said.tied or checkpoint.has(name):  # words in codes are not compared with a stored head
        words = checkpoint.take_words(name, config.vocab_size, config.hidden_size)
    return LanguageHead(words.to(checkpoint.device), checkpoint.decodes)


def _load_head(config: ModelConfig, head: HeadConfig | WordHeadConfig, first: Model, checkpoint: Checkpoint) -> Head:
    """`first`: the model that has the word embeddings. On another device, a tied head takes its rows from there."""
    if isinstance(head, HeadConfig):
        return Head.load(config, head, checkpoint)
    name, words = "lm_head.weight", first.words
    assert isinstance(words, Tensor), _IN_CODES
    table = checkpoint.take_tied(name, words) if head.tied else checkpoint.take_embedding(name, *words.shape)
    return Head.of_words(head, table, checkpoint.device)
