"""Runs a network of transformers in our batches, for architectures without a family here. Only `backend` chooses it.

transformers is imported only when it is used. It builds the network, and our own `Checkpoint` reads the weights.
"""

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import ModelError
from engine.model.base import Model
from engine.model.config import ModelConfig
from engine.model.keys import Keys
from engine.model.weights import Checkpoint, ShapeCounter, WeightSource
from engine.packages import install
from engine.run.batch import PackedBatch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(ModelConfig):
    folder: Path  # transformers reads config.json there
    own_code: bool  # whether the network is the folder's own code
    keeps_scores: bool  # whether attention holds the scores of all pairs of tokens


class Transformers(Model):
    """A network of transformers with its weights.

    If padding does not change the vectors, texts of similar lengths share a pass, padded to the longest. A trial at load decides.
    """

    eager_only = True
    architectures = ()

    @staticmethod
    def read_config(keys: Keys, trust_remote_code: bool = False) -> TransformersConfig:
        """The config. `max_position_embeddings` is 0 if the architecture has no limit.

        Raises: ModelError, also for code that is not trusted.
        """
        folder, own_code = keys.path.parent, trust_remote_code and bool(keys.get("auto_map"))
        if own_code:
            log.warning("%s: its own code runs, because trust_remote_code allows it: %s", _origin(folder), keys.get("auto_map"))
        hf = _read(keys, trust_remote_code)
        if getattr(hf, "quantization_config", None) is not None:
            raise ModelError(
                f"{keys.path}: quantization_config is not supported with backend transformers; leave the backend out, or use "
                "the checkpoint that is not quantised"
            )
        if (
            getattr(hf, "is_encoder_decoder", False)
            and not own_code
            and type(hf) not in _library().MODEL_FOR_TEXT_ENCODING_MAPPING
        ):
            raise ModelError(f"{keys.path}: {hf.model_type} is an encoder with a decoder, which gives no vector for a text")
        if hf.model_type == "big_bird" and hf.attention_type == "block_sparse":
            raise ModelError(
                f"{keys.path}: attention_type block_sparse is not supported, because after one short text transformers computes "
                "full attention for all texts; set it to original_full, or use another model"
            )
        own = Keys(keys.path, {name: getattr(hf, name, None) for name in (*_REQUIRED, *_OPTIONAL)})
        hidden_size, n_heads = own.number("hidden_size"), own.number("num_attention_heads", 1)
        positions = own.get("max_position_embeddings")
        positions = positions if isinstance(positions, int) and positions > 0 else 0
        return TransformersConfig(
            architecture=keys.architecture,
            vocab_size=own.number("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=own.number("intermediate_size", 4 * hidden_size),
            n_layers=own.number("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=n_heads,
            head_dim=max(1, hidden_size // n_heads),
            norm_eps=1e-12,  # not used: the network has its own
            max_position_embeddings=positions,
            causal=False,  # not known; only the network itself uses it
            pooling="mean",
            max_input_length=positions,
            folder=folder,
            own_code=own_code,
            keeps_scores=own_code or not getattr(_auto(hf, own_code)[1].get(type(hf), None), "_supports_sdpa", False),
        )

    @staticmethod
    def peak_values(config: TransformersConfig) -> int:
        # Generous, because the architecture's own figure is not known. Padding doubles it.
        longest = config.max_input_length
        scores = 2 * config.n_heads * longest if config.keeps_scores else 2 * longest
        return 2 * (10 * config.hidden_size + 3 * config.intermediate_size + scores)

    def __init__(self, config: TransformersConfig, checkpoint: WeightSource) -> None:
        keys = Keys(config.folder / "config.json", {})
        hf = _read(keys, config.own_code)
        with torch.device("meta"):
            network = _build(hf, config, torch.float32)
        if isinstance(checkpoint, ShapeCounter):
            _count(network, checkpoint)
            return
        assert isinstance(checkpoint, Checkpoint)
        self.network = _load(network, hf, config, checkpoint)
        self.padding = getattr(hf, "pad_token_id", None) or 0
        _check_positions(self.network, config)
        self.stretch = 2
        try:
            if not self._ignores_padding(config, checkpoint.device):
                self.stretch = 1
                log.info("%s: padding changes vectors, so only texts of equal length share a pass", config.folder)
        except Exception as error:
            what = f"{config.architecture} does not run on token ids alone in {str(checkpoint.dtype).removeprefix('torch.')}"
            raise ModelError(f"{config.folder}: {what}: {error!r}") from error

    def forward(self, batch: PackedBatch, pooled_only: bool = False) -> Tensor:
        sequences = torch.split(batch.token_ids.long(), list(batch.lengths))
        states: dict[int, Tensor] = {}
        for group in like_lengths(batch.lengths, self.stretch):
            states |= zip(group, self._run([sequences[index] for index in group]), strict=True)
        hidden = torch.cat([states[index] for index in range(len(sequences))])  # [T, C]
        return hidden.index_select(0, batch.pooled_rows) if pooled_only else hidden

    def _run(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """The hidden states of each sequence, [its tokens, C], from one padded pass."""
        lengths = [len(ids) for ids in sequences]
        ids = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True, padding_value=self.padding)  # [B, S]
        mask = torch.arange(max(lengths), device=ids.device) < torch.tensor(lengths, device=ids.device)[:, None]
        hidden = self.network(input_ids=ids, attention_mask=mask.long()).last_hidden_state  # [B, S, C]
        return [row[:length] for row, length in zip(hidden, lengths, strict=True)]

    def _ignores_padding(self, config: TransformersConfig, device: torch.device) -> bool:
        """Whether a text has the same states alone and beside a longer text, within the dtype's precision.

        The states differ if the network ignores the mask when it mixes tokens, by convolutions (ConvBERT) or Fourier transforms
        (FNet). With longrope they differ only beside texts that are longer than the trial's.
        """
        longer = torch.arange(min(24, config.max_input_length), device=device) % config.vocab_size
        alone = self._run([longer[:5]])[0]
        rope = getattr(self.network.config, "rope_parameters", None) or {}  # some networks have one for each type of layer
        if any(each.get("rope_type") == "longrope" for each in (rope, *rope.values()) if isinstance(each, dict)):
            return False
        padded = self._run([longer[:5], longer])[0]
        return bool((alone - padded).abs().max() <= torch.finfo(alone.dtype).eps ** 0.5 * alone.abs().max())


_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers")
_OPTIONAL = ("intermediate_size", "num_attention_heads", "max_position_embeddings")


def like_lengths(lengths: Sequence[int], stretch: int) -> list[list[int]]:
    """Groups of indices, longest first. Each length of a group is at least the group's longest length divided by `stretch`."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not groups or lengths[index] * stretch < lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(index)
    return groups


def _library() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        how = install("'emberforge[transformers]'")
        raise ModelError(f"backend transformers needs the transformers library: {how}") from error


def _read(keys: Keys, trust_remote_code: bool) -> Any:
    """transformers' configuration of the folder."""
    transformers = _library()
    try:
        return transformers.AutoConfig.from_pretrained(str(keys.path.parent), trust_remote_code=trust_remote_code)
    except Exception as error:  # configuration classes raise their own kinds of exceptions
        kind = keys.get("model_type")
        if keys.get("auto_map") and not trust_remote_code and kind not in transformers.CONFIG_MAPPING:
            raise ModelError(
                f"{keys.path}: model_type {kind!r} is code that comes with the model ({keys.get('auto_map')}); if you have read "
                "it and trust it, give --trust-remote-code"
            ) from error
        raise ModelError(f"{keys.path}: transformers {transformers.__version__} cannot read it: {_first_line(error)}") from error


def _auto(hf: Any, own_code: bool) -> tuple[Any, Any]:
    """(transformers' auto class, its table of network classes). For T5 and similar networks, those of the encoder."""
    transformers = _library()
    if not own_code and type(hf) in transformers.MODEL_FOR_TEXT_ENCODING_MAPPING:
        return transformers.AutoModelForTextEncoding, transformers.MODEL_FOR_TEXT_ENCODING_MAPPING
    return transformers.AutoModel, transformers.MODEL_MAPPING


def _build(hf: Any, config: TransformersConfig, dtype: torch.dtype) -> nn.Module:
    """The network without its weights. This function chooses the implementation of attention, not config.json."""
    hf.use_cache = False
    auto, _ = _auto(hf, config.own_code)
    make = {"trust_remote_code": config.own_code, "dtype": dtype}
    try:
        try:
            network: nn.Module = auto.from_config(hf, attn_implementation="sdpa", **make)
        except ValueError:
            network = auto.from_config(hf, attn_implementation="eager", **make)
    except Exception as error:
        raise ModelError(f"{config.folder}: transformers cannot build {config.architecture}: {_first_line(error)}") from error
    return network


def _load(network: Any, hf: Any, config: TransformersConfig, checkpoint: Checkpoint) -> nn.Module:
    """The network with its weights, on the checkpoint's device and in its dtype.

    Raises: ModelError for missing tensors. A pooler's tensors may be missing, because this engine does not run poolers.
    """
    try:
        loaded, report = type(network).from_pretrained(
            None,
            config=hf,
            state_dict=checkpoint.take_all(),
            dtype=checkpoint.dtype,
            attn_implementation=network.config._attn_implementation,
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelError(f"{config.folder}: transformers cannot load {config.architecture}: {_first_line(error)}") from error
    missing = sorted(name for name in report["missing_keys"] if "pooler" not in name)
    if missing:
        raise ModelError(f"{config.folder}: {len(missing)} tensors are missing: {', '.join(missing[:8])}")
    if report["unexpected_keys"]:
        log.info("%s: not needed for embeddings, not loaded: %s", config.folder, ", ".join(sorted(report["unexpected_keys"])))
    if config.own_code:
        # transformers 5 builds the network without memory, so values that such code computes in its constructor are undefined.
        built = _build(hf, config, checkpoint.dtype)
        built.load_state_dict(loaded.state_dict(), assign=True)
        loaded = built
    # `_apply` moves one tensor at a time, as Module.to does. Clones made in `take_all` would all be in memory at once.
    found: nn.Module = loaded.eval()._apply(checkpoint.to_device)
    return found


def _count(network: nn.Module, shapes: ShapeCounter) -> None:
    """Take the network's parameters, so that a plan knows the size."""
    tables = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    for parameter in network.parameters():  # gives tied parameters once
        take = shapes.take_embedding if id(parameter) in tables else shapes.take
        take("", *parameter.shape)


def _check_positions(network: nn.Module, config: TransformersConfig) -> None:
    """Stop if a position table has too few rows for the longest text.

    If positions begin after the padding token's position, as in RoBERTa, config.json counts more positions than a text can have.
    """
    for name, table in network.named_modules():
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding) and table.padding_idx is not None:
            room = table.num_embeddings - table.padding_idx - 1
            if config.max_input_length > room:
                raise ModelError(f"{config.folder}: {name} has room for {room} tokens; give --max-input-tokens {room}")


def _origin(folder: Path) -> str:
    """The model and revision of a folder in the Hub's cache, or the path of another folder."""
    if folder.parent.name != "snapshots":
        return str(folder)
    return f"{folder.parent.parent.name.removeprefix('models--').replace('--', '/')} at revision {folder.name}"


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0]
