"""`Engine`: one loaded model on one device; ids in, vectors out. Usable alone, with no server around it."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.devices import (
    DTYPES,
    DtypeName,
    choose_device,
    choose_dtype,
    compute_dtype,
    default_batch_tokens,
    is_integrated,
)
from engine.errors import InvalidInput, ModelError, NotFinite
from engine.heads.classifier import Head
from engine.heads.dense import Dense
from engine.heads.pool import pool
from engine.heads.splade import Splade, most_splade_seqs
from engine.heads.tokens import TokenOutputs
from engine.hub import resolve_model
from engine.model import footprint as memory
from engine.model.config import ONE_TOKEN, Backend, DenseConfig, HeadConfig, ModelConfig, OutputName, Pooling
from engine.model.families import Model, family_of
from engine.model.families.decoder import Decoder
from engine.model.folder import load_model_config, read_no_words
from engine.model.weights import Checkpoint
from engine.options import EmbedOptions, EncodeOptions, TextOrIds, TokenIds, check_dimensions
from engine.results import Chunks, LexicalWeights, NonZero, Rows
from engine.run import reserve
from engine.run.batch import BatchPacker, BatchShape, PackedBatch
from engine.run.cuda import CudaRunner
from engine.run.flight import Flight, Landed, Output, Ragged, Vectors
from engine.run.tiles import tiling
from engine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Engine:
    """One model, ready to run. Not thread-safe: one thread at a time calls `launch` (see `engine/loop.py`)."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        model: Model,
        dtype: torch.dtype,
        device: torch.device,
        max_batch_tokens: int | None,
        dense: Sequence[Dense | Head] = (),
        splade: Splade | None = None,
        token_outputs: TokenOutputs | None = None,
        no_words: Sequence[int] = (),
    ) -> None:
        """`no_words`: ids of the tokens that have no lexical weight."""
        self.config, self.tokenizer, self.model, self.dense = config, tokenizer, model, dense
        self.splade, self.token_outputs, self.no_words = splade, token_outputs, np.array(no_words, dtype=np.int32)
        self.dtype, self.device = dtype, device
        heads = (config.n_heads, config.n_kv_heads)
        cut = None
        if not model.walks_lengths:
            cut = tiling(heads, config.head_dim, compute_dtype(dtype), device, config.causal, model.biases_scores)
        self.packer = BatchPacker(config.pooling, config.embedding_size, cut, config.tells_segments, model.shares_prefixes)
        self._cuda = None
        if device.type == "cuda":
            most = memory.most_graph_tokens(config, dtype)
            self._cuda = CudaRunner(self._vectors, self.packer, device, self._wide_values, most)
        self.max_batch_tokens = max_batch_tokens or default_batch_tokens(device)

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        dtype: DtypeName | Literal["auto"] = "auto",
        device: str = "auto",
        pooling: Pooling | None = None,
        default_prompt_name: str | None = None,
        default_prompt: str | None = None,
        max_batch_tokens: int | None = None,
        max_input_tokens: int | None = None,
        num_threads: int | None = None,
        backend: Backend = "emberforge",
        trust_remote_code: bool = False,
    ) -> "Engine":
        """Load a model folder, a Hub id, or the embedded model, and run it: once on a CPU; on a GPU until the best token
        budget is known and the memory of the largest batch is set aside.

        Args:
            dtype: "auto" takes bfloat16 where the device computes it natively, else float32. "float8" and "int8" are of the
                layers' matrices and what is multiplied with them; the rest is in bfloat16.
            device: "auto" takes the first GPU if there is one.
            pooling: for folders that do not name theirs.
            default_prompt_name: the model's prompt for texts whose request asks for none; overrides its authors' choice.
            default_prompt: the same, as a text.
            max_batch_tokens: token budget of one forward pass; None takes the CPU's default, or what is measured on a GPU.
            max_input_tokens: a limit on an input below the model's own: longer ones are cut or refused, and take no memory.
            num_threads: CPU threads of one operation; None leaves torch's own choice.
            backend: "transformers" runs its network, for architectures that are not ours; slower, and it must be installed.
            trust_remote_code: with that backend, run the code that a model's folder brings.
        Raises: ModelError with the file and the way out.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        folder = resolve_model(str(model), code=trust_remote_code)
        config = load_model_config(
            folder,
            pooling,
            default_prompt_name=default_prompt_name,
            default_prompt=default_prompt,
            backend=backend,
            trust_remote_code=trust_remote_code,
        )
        family = family_of(config)
        if max_input_tokens is not None:
            config = replace(config, max_input_length=min(config.max_input_length, max_input_tokens))
        chosen_device = choose_device(device)
        chosen_dtype = choose_dtype(dtype, chosen_device, family.overflows_float16)
        if chosen_dtype.itemsize == 1 and backend != "emberforge":
            raise ModelError(f"{dtype} is of our own networks' layers; leave out --backend {backend}, or use bfloat16")
        wide_dtype = compute_dtype(chosen_dtype)
        if chosen_device.type == "cpu":
            reserve.keep_freed_memory()
        else:
            torch.cuda.set_device(chosen_device)
            reserve.grow_in_place(chosen_device)
            # Split products would be summed up in bf16 otherwise; everything else accumulates in fp32.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        tokenizer = Tokenizer.load(folder, config)
        with (
            reserve.reservation(chosen_device),
            torch.inference_mode(),
            Checkpoint(folder, chosen_device, chosen_dtype) as checkpoint,
        ):
            num_bytes = checkpoint.num_bytes + memory.dense_parameters(config) * wide_dtype.itemsize
            num_bytes -= memory.bytes_saved_in_8_bits(config, chosen_dtype)
            reserve.check_fits(num_bytes, chosen_device, str(folder))
            network = family(config, checkpoint)
            head = [] if config.head is None else [_load_head(config, config.head, network, checkpoint)]
            splade = None
            if config.splade is not None and family.masked_lm is not None:
                splade = Splade(config, checkpoint, family.masked_lm, network.words)
            checkpoint.finish(network.needless)
            dense = [_load_dense(each, folder, chosen_device, wide_dtype) for each in config.dense]
            token_outputs = TokenOutputs.load(config, folder, chosen_device, wide_dtype)
            no_words = tokenizer.ids(read_no_words(folder)) if config.lexical else ()
            engine = cls(
                config,
                tokenizer,
                network,
                chosen_dtype,
                chosen_device,
                max_batch_tokens,
                [*dense, *head],
                splade,
                token_outputs,
                no_words,
            )
            engine._warm_up(max_batch_tokens)
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

        Returns: [len(inputs), dimensions or embedding_size] float32.
        Raises: EmptyInput, InvalidInput or TokenizerError naming the input; BackendError on a non-finite vector.
        """
        if isinstance(inputs, str):
            raise InvalidInput("embed() takes a list of inputs; put the string into a list")
        check_dimensions(dimensions, self.config.embedding_size)
        options = EmbedOptions(normalize=normalize, dimensions=dimensions)
        sequences = self.tokenizer.encode(inputs, EncodeOptions(truncate, truncation_direction, prompt_name))
        width = dimensions or self.config.embedding_size
        vectors = np.empty((len(sequences), width), dtype=np.float32)
        # Longest first, so that every pass holds sequences of like length and the largest pass comes first.
        order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))

        def land(rows: list[int], flight: Flight) -> None:
            output = flight.wait()
            if not output.finite.all():
                raise NotFinite()
            vectors[rows] = output.vectors[:, :width]

        flights: deque[tuple[list[int], Flight]] = deque()
        for rows in self._cut(order, sequences):
            flights.append((rows, self.launch([sequences[i] for i in rows], [options] * len(rows))))
            if len(flights) > 1:  # one pass runs while the next is packed
                land(*flights.popleft())
        if flights:
            land(*flights.popleft())
        return vectors

    def launch(
        self,
        sequences: Sequence[TokenIds],
        options: Sequence[EmbedOptions] | None = None,
        want: tuple[OutputName, ...] = (),
    ) -> Flight:
        """Start one forward pass over at least one sequence, whatever its size; on a CPU it is over on return.

        Args:
            options: one per sequence; None asks for whole, normalised vectors.
            want: what any of them asks for besides its vector, sorted; every sequence gets it.
        Raises: OutOfMemory when it does not fit; BackendError; DeviceLost when the device is gone for good; InvalidInput for
            an output that the model does not give, or a span outside of its sequence (`check_outputs` finds them before).
        """
        with torch.inference_mode():
            if want:
                return self._launch_for(sequences, options or [EmbedOptions()] * len(sequences), want)
            if self._cuda is not None:
                return self._cuda.launch(sequences, options)
            vectors, _ = self._vectors(self.packer.pack(sequences, options, whole=False), ())
            return Landed(Output(vectors.numpy()))

    def _launch_for(self, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions], want: tuple[OutputName, ...]) -> Flight:
        """A pass that gives more than vectors."""
        if unknown := set(want) - {"tokens", *self.config.outputs}:
            raise InvalidInput(
                f"{self.config.architecture} with pooling {self.config.pooling} has no output {', '.join(unknown)}"
            )
        land = partial(self._output, sequences, options, want)
        if self.splade is not None:
            want = tuple(name for name in want if name != "sparse")  # the vectors say it all
        if self._cuda is not None:
            return self._cuda.launch(sequences, options, want, land)
        batch = self.packer.pack(sequences, options)
        if "chunks" in want:
            batch = replace(batch, spans=self.packer.pack_spans(batch.lengths, options))
        vectors, rows = self._vectors(batch, want)
        return Landed(land(vectors.numpy(), {name: each.numpy() for name, each in rows.items()}))

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> Tensor:
        """The last hidden states, final norm included: [T, hidden_size] in the engine's dtype."""
        return self.model.forward(batch)

    @property
    def passes_in_flight(self) -> int:
        """How many passes it pays to have launched: a GPU is given the next one while it computes."""
        return 1 if self._cuda is None else 2

    @property
    def max_batch_seqs(self) -> int | None:
        """Sequences that one pass may have; None where their tokens alone count."""
        return None if self.splade is None else most_splade_seqs(self.config.vocab_size)

    @property
    def max_graph_tokens(self) -> int:
        """Batches of up to so many tokens run as CUDA graphs; 0 on a CPU."""
        return 0 if self._cuda is None else self._cuda.max_graph_tokens

    @property
    def longest_input(self) -> int:
        """Tokens of the longest input that there is memory for; at most the model's limit."""
        tried = None if self._cuda is None else self._cuda.longest_input
        return self.config.max_input_length if tried is None else tried

    @property
    def shares_host_memory(self) -> bool:
        """Whether a pass takes memory that the rest of the machine takes from too."""
        return self.device.type == "cpu" or is_integrated(self.device)

    @property
    def dtype_name(self) -> DtypeName:
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)

    def _vectors(self, batch: PackedBatch, want: tuple[OutputName, ...]) -> tuple[Tensor, dict[OutputName, Tensor]]:
        """(vectors, fp32 rows of what else is wanted) of a batch on the engine's device: for each token one, of chunks for each
        span."""
        pooled_only = self.config.pooling in ONE_TOKEN and not want
        hidden = self.model.forward(batch, pooled_only)
        if self.splade is not None:
            vectors = self.splade(hidden, batch.cu_seqlens, batch.dimensions, batch.normalize)
        else:
            vectors = pool(hidden, batch, self.config.pooling, self.dense, pooled_only)
        if not want:
            return vectors, {}
        rows = self.token_outputs.rows(hidden, want) if self.token_outputs is not None else {}
        if "tokens" in want:
            rows["tokens"] = hidden.float()
        if "chunks" in want:
            parts = [vectors[:0]]
            for spans in batch.spans:
                parts.append(pool(hidden.index_select(0, spans.token_ids), spans, self.config.pooling, self.dense))
            rows["chunks"] = torch.cat(parts)
        return vectors, rows

    def _output(
        self,
        sequences: Sequence[TokenIds],
        options: Sequence[EmbedOptions],
        want: tuple[OutputName, ...],
        vectors: Vectors,
        rows: Mapping[OutputName, Vectors],
    ) -> Output:
        """What a pass gave, ready to be cut by sequence."""
        bounds = [0, *accumulate(map(len, sequences))]
        ragged: dict[OutputName, Ragged] = {}
        for name in want:
            if name == "sparse":
                given = NonZero(vectors) if self.splade else LexicalWeights(Rows(rows[name], bounds), sequences, self.no_words)
                ragged[name] = given
            elif name == "chunks":
                ragged[name] = Chunks(Rows(rows[name], [0, *accumulate(len(each.spans) for each in options)]), options)
            else:
                ragged[name] = Rows(rows[name], bounds, skip=int(name == "colbert"))
        return Output(vectors, ragged)

    def _wide_values(self, shape: BatchShape, want: tuple[OutputName, ...]) -> int:
        """How many numbers a pass gives besides vectors of a usual width."""
        widths = {"tokens": self.config.hidden_size, "colbert": self.config.colbert_size or 0, "sparse": 1, "chunks": 0}
        of_tokens = shape.num_tokens * sum(widths[name] for name in want)
        return of_tokens + (shape.num_seqs * self.config.embedding_size if self.splade is not None else 0)

    def _cut(self, order: list[int], sequences: Sequence[TokenIds]) -> list[list[int]]:
        """`order` in groups of at most `max_batch_tokens` tokens and `max_batch_seqs` sequences, at least one sequence each."""
        groups: list[list[int]] = []
        room, most = 0, self.max_batch_seqs
        for index in order:
            if not groups or len(sequences[index]) > room or len(groups[-1]) == most:
                groups.append([])
                room = self.max_batch_tokens
            groups[-1].append(index)
            room -= len(sequences[index])
        return groups

    def _warm_up(self, max_batch_tokens: int | None) -> None:
        """The first call of a kernel pays for its choice, and a broken model stops here."""
        if not self.launch(self.tokenizer.encode(["warm up"], EncodeOptions())).wait().finite.all():
            raise ModelError(
                f"the model gives vectors that are not finite in {self.dtype_name}; try --dtype float32 or check the weights"
            )
        if self._cuda is not None:
            self.max_batch_tokens = self._cuda.tune(
                self.config.vocab_size, self.config.max_input_length, max_batch_tokens, self.max_batch_seqs
            )
            log.info("token budget %d, CUDA graphs up to %d tokens", self.max_batch_tokens, self.max_graph_tokens)


def _load_dense(config: DenseConfig, folder: Path, device: torch.device, dtype: torch.dtype) -> Dense:
    with Checkpoint(folder / config.folder, device, dtype) as checkpoint:
        layer = Dense(config, checkpoint)
        checkpoint.finish(())
    return layer


def _load_head(config: ModelConfig, head: HeadConfig, network: Model, checkpoint: Checkpoint) -> Head:
    if head.tokens is None:
        return Head.load(config, head, checkpoint)
    assert isinstance(network, Decoder)
    tied = head.out == "embed_tokens"
    shape = (config.vocab_size, config.hidden_size)
    return Head.of_words(head, network.embed_tokens if tied else checkpoint.take_table(f"{head.out}.weight", *shape))
