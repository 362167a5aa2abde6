"""`Engine`: one loaded model on one device; ids in, vectors out. Usable alone, with no server around it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import PackedBatch, pack
from engine.devices import DTYPES, DtypeName, choose_device, choose_dtype, default_batch_tokens, keep_freed_memory
from engine.errors import BackendError, InvalidInput, ModelError
from engine.hub import resolve_model
from engine.model_config import ModelConfig, Pooling, load_model_config
from engine.models import MODELS, Model
from engine.pooling import POOLERS, EmbedOptions, check_dimensions, finish
from engine.tokenizer import EncodeOptions, TextOrIds, TokenIds, Tokenizer
from engine.weights import Checkpoint

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Output:
    """What one forward pass gives, on the engine's device."""

    pooled: Tensor  # [B, hidden_size] fp32, neither cut nor normalised
    hidden: Tensor | None  # [T, hidden_size] fp32, only where asked for


class Engine:
    """One model, ready to run. Not thread-safe: one thread at a time calls `run` (see `engine/loop.py`)."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        model: Model,
        dtype: torch.dtype,
        device: torch.device,
        max_batch_tokens: int,
    ) -> None:
        self.config, self.tokenizer, self.model = config, tokenizer, model
        self.dtype, self.device, self.max_batch_tokens = dtype, device, max_batch_tokens
        self._pool = POOLERS[config.pooling]

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        dtype: DtypeName | Literal["auto"] = "auto",
        device: str = "auto",
        pooling: Pooling | None = None,
        max_batch_tokens: int | None = None,
        num_threads: int | None = None,
    ) -> "Engine":
        """Load a model folder, a Hub id, or the embedded model, and run it once.

        Args:
            dtype: "auto" takes bfloat16 where the device computes it natively, else float32.
            device: "auto" takes the first GPU if there is one.
            pooling: for folders that do not name theirs.
            max_batch_tokens: token budget of one forward pass; None takes the device's default.
            num_threads: CPU threads of one operation; None leaves torch's own choice.
        Raises: ModelError with the file and the way out.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        folder = resolve_model(str(model))
        config = load_model_config(folder, pooling)
        chosen_device = choose_device(device)
        if chosen_device.type == "cpu":
            keep_freed_memory()
        chosen_dtype = choose_dtype(dtype, chosen_device, config.family)
        tokenizer = Tokenizer.load(folder, config)
        with torch.inference_mode(), Checkpoint(folder, chosen_device, chosen_dtype) as checkpoint:
            network = MODELS[config.family](config, checkpoint)
            checkpoint.finish(network.needless)
        engine = cls(
            config, tokenizer, network, chosen_dtype, chosen_device, max_batch_tokens or default_batch_tokens(chosen_device)
        )
        engine._warm_up()
        return engine

    def embed(
        self,
        inputs: Sequence[TextOrIds],
        *,
        prompt_name: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        truncate: bool = True,
        truncation_direction: Literal["left", "right"] = "right",
    ) -> NDArray[np.float32]:
        """Embed texts (or lists of token ids, used as they are) in as many forward passes as the budget needs.

        Returns: [len(inputs), dimensions or hidden_size] float32.
        Raises: EmptyInput, InvalidInput or TokenizerError naming the input; BackendError on a non-finite vector.
        """
        if isinstance(inputs, str):
            raise InvalidInput("embed() takes a list of inputs; put the string into a list")
        check_dimensions(dimensions, self.config.hidden_size)
        options = EmbedOptions(normalize=normalize, dimensions=dimensions)
        sequences = self.tokenizer.encode(inputs, EncodeOptions(truncate, truncation_direction, prompt_name))
        vectors = np.empty((len(sequences), dimensions or self.config.hidden_size), dtype=np.float32)
        # Longest first, so that every pass holds sequences of like length and the largest pass comes first.
        order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
        for rows in self._cut(order, sequences):
            pooled = self.run([sequences[i] for i in rows]).pooled
            vectors[rows] = finish(pooled, options).cpu().numpy()
        if not np.isfinite(vectors).all():
            raise BackendError("the model gave a vector that is not finite")
        return vectors

    @torch.inference_mode()
    def run(self, sequences: Sequence[TokenIds], want_hidden: bool = False) -> Output:
        """One forward pass over at least one sequence, whatever its size."""
        batch = pack(sequences, self.device)
        hidden = self.forward(batch)
        return Output(self._pool(hidden, batch), hidden.float() if want_hidden else None)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> Tensor:
        """The last hidden states, final norm included: [T, hidden_size] in the engine's dtype."""
        return self.model.forward(batch)

    @property
    def dtype_name(self) -> DtypeName:
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)

    def _cut(self, order: list[int], sequences: Sequence[TokenIds]) -> list[list[int]]:
        """`order` in groups of at most `max_batch_tokens` tokens, at least one sequence each."""
        groups: list[list[int]] = []
        room = 0
        for index in order:
            if len(sequences[index]) > room or not groups:
                groups.append([])
                room = self.max_batch_tokens
            groups[-1].append(index)
            room -= len(sequences[index])
        return groups

    def _warm_up(self) -> None:
        """One small forward: the first call of a kernel pays for its choice, and a broken model stops here."""
        pooled = self.run(self.tokenizer.encode(["warm up"], EncodeOptions())).pooled
        if not torch.isfinite(pooled).all():
            raise ModelError(
                f"the model gives vectors that are not finite in {self.dtype_name}; try --dtype float32 or check the weights"
            )
