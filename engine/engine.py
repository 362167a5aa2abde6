"""`Engine`: one loaded model on one device or several; ids in, vectors out. Usable alone, with no server around it."""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.devices import DTYPES, DtypeName, compute_dtype, default_batch_tokens, is_integrated
from engine.errors import BackendError, InvalidInput, ModelError, NotFinite, OutOfMemory
from engine.heads.splade import most_splade_seqs
from engine.kernels.tiles import LEAST_TILED, tiling
from engine.load import Loaded, choose, choose_all, read_config
from engine.load import load as load_parts
from engine.model.base import Model
from engine.model.config import Backend, KvCacheDtype, ModelConfig, OutputName, Pooling, with_kv_cache_dtype
from engine.model.footprint import MOST_STREAMS
from engine.model.slower_in_8_bits import slower_in_8_bits
from engine.options import EmbedOptions, EncodeOptions, Input, SamplingOptions, TokenIds, check_dimensions
from engine.passes import Passes
from engine.run import reserve
from engine.run.batch import PackedBatch
from engine.run.cuda import CudaRunner
from engine.run.cuda_embedding import EmbeddingPipeline
from engine.run.cuda_pipeline import CudaPipeline
from engine.run.cuda_streams import StreamRunner
from engine.run.fits import check_generator_fits, pass_bytes, planned_bytes
from engine.run.flight import Flight, Vectors
from engine.run.kv_cache import PAGE_SIZE, KVCache, default_tokens
from engine.run.pack import BatchPacker
from engine.run.pipeline import Pipeline
from engine.run.runner import CpuRunner
from engine.run.sleep import Sleeper, tensors_of
from engine.run.stages import Stage, plan_stages
from engine.run.streams import StreamPacker
from engine.run.tune import tune, tune_streams
from engine.schedule.cohort import CohortPass
from engine.schedule.pages import Pages
from engine.schedule.piece import Piece
from engine.schedule.request import Request
from engine.schedule.stream import Answer, Stream, Token
from engine.text.grammar import Compiler

log = logging.getLogger(__name__)


class Engine:
    """One model, ready to run. Not thread-safe: one thread at a time calls `launch` or `embed` (see `engine/loop.py`)."""

    def __init__(
        self,
        config: ModelConfig,
        parts: Loaded,
        dtype: torch.dtype,
        device: torch.device,
        cache_tokens: int | None = None,
        max_batch_tokens: int | None = None,
        stages: Sequence[Stage] = (),
        speculate: bool = True,
        sleeper: Sleeper | None = None,
    ) -> None:
        """
        Args:
            device: the last stage's, if there are several.
            cache_tokens: the size of the cache of a model that generates.
            max_batch_tokens: for the default size of that cache; None for a budget that warm-up finds.
            stages: the parts of the model, if it is on several devices. `config` is the whole model's.
            speculate: as in `load`.
            sleeper: of an engine that can sleep, from `sleeper_of`; it has the memory of weights and caches.
        """
        self._sleeper = sleeper
        self.stages = tuple(stages) or (Stage(config, device),)
        caches: list[KVCache] = []
        if config.generation is not None:
            wide = compute_dtype(dtype)
            if cache_tokens is None:
                passes = pass_bytes(config, dtype, device, max_batch_tokens)
                cache_tokens = default_tokens(config, wide, device, passes)
            caches = [KVCache(stage.config, cache_tokens, wide, stage.device, sleeper) for stage in self.stages]
        self.pages = Pages(caches[0].num_pages, PAGE_SIZE) if caches else None
        self.config, self.tokenizer, self.network, self.packer = config, parts.tokenizer, parts.network, parts.packer
        self.prompts = parts.prompts
        if self.pages is not None:
            self.tokenizer.limit_to(min(config.max_input_length, self.pages.num_pages * PAGE_SIZE))
        self._grammars: Compiler | None = None
        if parts.prompts is not None and config.generation is not None:
            self._grammars = Compiler(parts.prompts.tokenizer.to_str, config.vocab_size, config.generation.eos_ids)
        self.dtype, self.device, self.speculate = dtype, device, speculate
        self.max_batch_tokens = default_batch_tokens(device)
        cache = caches[0] if caches else None
        if cache is not None and cache.in_8_bits and self.packer.tiling is not None:
            self.packer = replace(self.packer, tiling=replace(self.packer.tiling, capability=LEAST_TILED))  # as its kernels need
        self.runner: CpuRunner | CudaRunner | StreamRunner | Pipeline  # a CudaPipeline is a StreamRunner
        if parts.earlier and caches:
            self.runner = self._pipeline(parts.earlier, caches)
        elif device.type == "cpu" or (cache is not None and self.packer.tiling is None):
            self.runner = CpuRunner(self.network, self.packer, cache, parts.earlier)
        elif cache is not None:
            self.runner = StreamRunner(self.network, StreamPacker.of(self.packer, self.network.model), cache, device)
        elif parts.earlier:
            self.packer = self._packer_for_all()
            self.runner = EmbeddingPipeline(parts.earlier, self.network, self.packer, [stage.device for stage in self.stages])
        else:
            self.runner = CudaRunner(self.network, self.packer, device)

    def _pipeline(self, earlier: Sequence[Model], caches: Sequence[KVCache]) -> Pipeline | CudaPipeline:
        """The runner of a model in stages. Our kernels compute it if they can compute each stage."""
        models = [*earlier, self.network.model]
        windows = tuple(dict.fromkeys(window for model in models for window in model.windows))
        heads = self.config.n_heads, self.config.n_kv_heads
        packers = []
        for cache in caches:
            tiles = tiling(heads, self.config.head_dim, compute_dtype(self.dtype), cache.device, self.config.causal)
            if tiles is None:
                return Pipeline(earlier, self.network, self.packer, caches)
            if cache.in_8_bits:
                tiles = replace(tiles, capability=LEAST_TILED)
            packers.append(StreamPacker.for_windows(tiles, windows))
        return CudaPipeline(earlier, self.network, packers, caches)

    def _packer_for_all(self) -> BatchPacker:
        """The last stage's packer, with tiles that the GPUs of all stages can compute."""
        tiles = self.packer.tiling
        capabilities = {torch.cuda.get_device_capability(stage.device) for stage in self.stages}
        if tiles is None or min(capabilities) < LEAST_TILED:
            return replace(self.packer, tiling=None)
        return self.packer if len(capabilities) == 1 else replace(self.packer, tiling=replace(tiles, capability=LEAST_TILED))

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        dtype: DtypeName | Literal["auto"] = "auto",
        device: str = "auto",
        devices: Sequence[str] = (),
        pooling: Pooling | None = None,
        default_prompt_name: str | None = None,
        default_prompt: str | None = None,
        max_batch_tokens: int | None = None,
        max_input_tokens: int | None = None,
        cache_tokens: int | None = None,
        kv_cache_dtype: KvCacheDtype = "auto",
        speculate: bool = True,
        sleeps: bool = False,
        num_threads: int | None = None,
        backend: Backend = "emberforge",
        trust_remote_code: bool = False,
        on_download: Callable[[float], None] | None = None,
        on_progress: Callable[[float], None] | None = None,
    ) -> "Engine":
        """Load a model folder, a Hub id, or the embedded model, and run it: once on a CPU; on a GPU until the best token
        budget is known and the memory of the largest batch is set aside.

        Args:
            dtype: "auto" takes bfloat16 where the device computes it natively, else float32. "float8" and "int8" are of the
                layers' matrices and what is multiplied with them, "int4" of the matrices; the rest is in bfloat16.
            device: "auto" takes the first GPU if there is one.
            devices: several devices of this machine, which get the model's layers in this order; instead of `device`. For
                decoders, whether they generate or give vectors or scores.
            pooling: for folders that do not name theirs. A model that generates also embeds with last_token.
            default_prompt_name: the model's prompt for texts whose request asks for none; overrides its authors' choice.
            default_prompt: the same, as a text.
            max_batch_tokens: token budget of one forward pass; None takes the CPU's default, or what is measured on a GPU.
            max_input_tokens: a limit on an input below the model's own: longer ones are cut or refused, and take no memory.
            cache_tokens: tokens that the cache of a model that generates holds. None chooses by the free memory.
            kv_cache_dtype: "fp8" keeps keys and values in 8 bits, for twice the tokens (docs/decisions/054); "auto" keeps them in
                the dtype that the model computes in.
            speculate: verify several tokens of an answer in one pass, where the text before foretells them (docs/decisions/049).
            sleeps: the engine can sleep, if it is on GPUs with memory of their own: see `sleep`.
            num_threads: CPU threads of one operation; None leaves torch's own choice.
            backend: "transformers" runs its network, for architectures that are not ours; slower, and it must be installed.
            trust_remote_code: with that backend, run the code that a model's folder brings.
            on_download: hears while files come from the Hub which share of their bytes is there.
            on_progress: hears while the weights are read which share of the tensors is there.
        Raises: ModelError with the file and the way out.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        folder, config = read_config(
            str(model), pooling, default_prompt_name, default_prompt, max_input_tokens, backend, trust_remote_code, on_download
        )
        config = with_kv_cache_dtype(config, kv_cache_dtype)
        if len(devices) > 1:
            chosen, where = choose_all(config, dtype, devices)
        else:
            chosen, only = choose(config, dtype, devices[0] if devices else device)
            where = [only]
        if why := slower_in_8_bits(config, chosen):
            log.warning("%s: %s", folder, why)
        stages: list[Stage] = []
        with ExitStack() as reserved, torch.inference_mode():
            for each in dict.fromkeys(where):
                reserved.enter_context(reserve.reservation(each))
            if len(where) > 1:
                stages, cache_tokens = plan_stages(config, chosen, where, max_batch_tokens, cache_tokens)
                log.info("layers by device: %s", ", ".join(f"{each.device} {len(each.config.layers)}" for each in stages))
            elif config.generation is not None:
                check_generator_fits(config, chosen, where[0], str(folder), max_batch_tokens, cache_tokens)
            last = stages[-1].config if stages else config
            parts = load_parts(folder, last, chosen, where[-1], on_progress, stages[:-1])
            sleeper = sleeper_of(parts, where) if sleeps else None
            engine = cls(config, parts, chosen, where[-1], cache_tokens, max_batch_tokens, stages, speculate, sleeper)
            engine.warm_up(max_batch_tokens)
        return engine

    def warm_up(self, max_batch_tokens: int | None) -> None:
        """The first call of a kernel pays for compiling it, and a broken model stops here."""
        if self.config.generation is not None:
            return self._warm_up_streams(max_batch_tokens)
        if not self.launch(self.tokenizer.encode(["warm up"], EncodeOptions())).wait().finite.all():
            raise ModelError(
                f"the model gives vectors that are not finite in {self.dtype_name}; try --dtype float32 or check the weights"
            )
        self.max_batch_tokens = max_batch_tokens or self.max_batch_tokens
        if isinstance(self.runner, CudaRunner):
            self.max_batch_tokens = tune(self.runner, self.config, self.dtype, max_batch_tokens, self.max_batch_seqs)
            self.tokenizer.limit_to(self.longest_input)  # a longer input would fail as out of memory
            log.info("token budget %d, CUDA graphs up to %d tokens", self.max_batch_tokens, self.max_graph_tokens)

    def _warm_up_streams(self, max_batch_tokens: int | None) -> None:
        self.max_batch_tokens = max_batch_tokens or self.max_batch_tokens
        if isinstance(self.runner, StreamRunner):
            assert self.pages is not None, "a model that generates has a cache"
            cache_tokens = self.pages.num_pages * PAGE_SIZE
            self.max_batch_tokens = tune_streams(self.runner, self.config, self.dtype, cache_tokens, max_batch_tokens)
            log.info(
                "token budget %d, %d tokens of cache, CUDA graphs up to %d tokens",
                self.max_batch_tokens, cache_tokens, self.max_graph_tokens,
            )  # fmt: skip
        try:
            self.generate([[0]], SamplingOptions(max_tokens=2, temperature=0.0))
        except NotFinite as error:
            raise ModelError(
                f"the model's logits are not finite in {self.dtype_name}; try --dtype float32 or check the weights"
            ) from error
        if self.config.embeds:
            self.embed([[0]])

    def embed(
        self,
        inputs: Sequence[Input],
        *,
        prompt_name: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        truncate: bool = True,
        truncation_direction: Literal["left", "right"] = "right",
    ) -> NDArray[np.float32]:
        """Embed texts, or token ids used as they are, in as many forward passes as the budget needs.

        Returns: [len(inputs), dimensions or embedding_size] float32.
        Raises: EmptyInput, InvalidInput or TokenizerError naming the input; BackendError naming the first input that failed.
        """
        if isinstance(inputs, str):
            raise InvalidInput("embed() takes a list of inputs; put the string into a list")
        if self.config.generation is not None and not self.config.embeds:
            raise InvalidInput("this model generates text; load it with pooling last_token to get vectors, too")
        check_dimensions(dimensions, self.config.embedding_size)
        options = EmbedOptions(normalize=normalize, dimensions=dimensions)
        sequences = self.tokenizer.encode(inputs, EncodeOptions(truncate, truncation_direction, prompt_name))
        width = dimensions or self.config.embedding_size
        vectors = None if self.pages is not None else self._embed_in_one_pass(sequences, options)
        return np.ascontiguousarray((self._embed_in_passes(sequences, options) if vectors is None else vectors)[:, :width])

    def _embed_in_one_pass(self, sequences: Sequence[TokenIds], options: EmbedOptions) -> Vectors | None:
        """A query's quickest way. None where one pass is not enough, or one of its vectors is not finite."""
        num_seqs, most_seqs = len(sequences), self.max_batch_seqs or sys.maxsize
        if not 0 < num_seqs <= most_seqs or sum(map(len, sequences)) > self.max_batch_tokens:
            return None
        try:
            output = self.launch(sequences, [options] * num_seqs).wait()
        except OutOfMemory:
            return None
        return output.vectors if output.finite.all() else None

    def _embed_in_passes(self, sequences: Sequence[TokenIds], options: EmbedOptions) -> Vectors:
        """As many passes as the budget and the memory need. Raises: BackendError naming the first input that failed."""
        requests = [Request([ids], options) for ids in sequences]
        # Longest first, so that every pass holds sequences of like length and the largest pass comes first.
        longest_first = sorted(requests, key=lambda request: -len(request.sequences[0]))
        Passes(self, self.max_batch_tokens, self.max_batch_seqs).run(longest_first)
        vectors = np.empty((len(requests), options.dimensions or self.config.embedding_size), dtype=np.float32)
        for index, request in enumerate(requests):
            error = request.future.exception()
            if error is not None:
                raise BackendError(f"input {index}: {error}") from error
            vectors[index] = request.future.result().vectors[0]
        return vectors

    def generate(self, prompts: Sequence[Sequence[int] | TokenIds], options: SamplingOptions) -> list[Answer]:
        """Continue prompts of token ids, all in the same passes.

        Returns: an answer for each prompt, in order.
        Raises: InvalidInput naming what is wrong with a prompt or the options; BackendError.
        """
        streams = [self.new_stream(prompt, options) for prompt in prompts]
        Passes(self, self.max_batch_tokens, self.max_batch_seqs).run(streams)
        return [stream.future.result() for stream in streams]

    def stream(self, prompt: Sequence[int] | TokenIds, options: SamplingOptions) -> Iterator[Token]:
        """Continue one prompt, token by token. Raises: as `generate`."""
        stream = self.new_stream(prompt, options)
        try:
            sent = 0
            for _ in Passes(self, self.max_batch_tokens, self.max_batch_seqs).steps([stream]):
                yield from stream.answer[sent:]
                sent = len(stream.answer)
            stream.future.result()
        finally:
            stream.future.cancel()  # gives the pages back if the caller has left

    def new_stream(self, prompt: Sequence[int] | TokenIds, options: SamplingOptions) -> Stream:
        """A stream for `EngineLoop.submit`. Its answer ends with the model's context at the latest.

        Raises: InvalidInput for options out of range, ids without an embedding, a prompt beyond the model's context, and a
            grammar that does not compile.
        """
        stream = Stream.begin(prompt, options, self.config.vocab_size, self.config.max_input_length)
        if options.grammar is not None and self._grammars is not None:
            stream.matcher = self._grammars.matcher(options.grammar, stream.options)
        if self.speculate and self.speculation_rows:
            stream.speculate()
        return stream

    def launch(
        self,
        sequences: Sequence[TokenIds],
        options: Sequence[EmbedOptions] | None = None,
        outputs: tuple[OutputName, ...] = (),
        pieces: Sequence[Piece] = (),
        together: CohortPass | None = None,
    ) -> Flight:
        """Start one forward pass over at least one sequence or piece, whatever its size; on a CPU it has ended on return.

        Args:
            options: one per sequence; None asks for whole, normalised vectors.
            outputs: what any of the sequences asks for besides its vector, sorted; every sequence gets it.
            pieces: what to compute of streams and sequences; for a model that generates, which takes no `sequences`.
        An engine that sleeps wakes up first.
            together: what to compute besides, of the streams of a cohort.
        Raises: OutOfMemory when the pass does not fit; BackendError; DeviceLost when the device is gone for good; InvalidInput
            for an output that the model does not give, or a span outside of its sequence (`check_outputs` finds them before).
        """
        if self.asleep:
            self.wake()
        with torch.inference_mode():
            if isinstance(self.runner, StreamRunner):
                return self.runner.launch(sequences, options, outputs, pieces, together)
            return self.runner.launch(sequences, options, outputs, *([pieces] if pieces else []))

    @torch.inference_mode()
    def sleep(self) -> bool:
        """Frees the memory of weights and cache on the GPUs. The weights stay in the host's pinned memory; the cache is lost.

        No pass may be under way.
        Returns: False if the engine cannot sleep, a stream holds pages, or the host has too little free memory for the weights.
        """
        if self._sleeper is None or self.asleep:
            return self.asleep
        if self.pages is not None and self.pages.num_free < self.pages.num_pages:
            return False
        if isinstance(self.runner, CudaRunner | StreamRunner):
            self.runner.graphs.wait()  # a capture runs a pass
        if not self._sleeper.sleep():
            return False
        if self.pages is not None:
            self.pages.forget()
        return True

    @torch.inference_mode()
    def wake(self) -> None:
        """Ends the sleep. Raises: BackendError if a GPU has too little free memory; then the engine still sleeps."""
        assert self._sleeper is not None, "only an engine that can sleep is asleep"
        log.info("awake after %.2f s", self._sleeper.wake())

    @property
    def asleep(self) -> bool:
        return self._sleeper is not None and self._sleeper.asleep

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> Tensor:
        """The last hidden states, final norm included: [T, hidden_size] in the engine's dtype. Not for several devices."""
        assert self.num_stages == 1, "the model has only its last layers here"
        return self.network.model.forward(batch)

    @property
    def model(self) -> Model:
        return self.network.model

    @property
    def passes_in_flight(self) -> int:
        """How many passes to have launched at once: a GPU gets the next one while it computes."""
        return self.runner.passes_in_flight

    @property
    def speculation_rows(self) -> int:
        """As in `engine.passes.Runner`."""
        return self.runner.speculation_rows if isinstance(self.runner, CpuRunner | StreamRunner | Pipeline) else 0

    @property
    def cohort_size(self) -> int:
        """As in `engine.passes.Runner`."""
        return MOST_STREAMS if isinstance(self.runner, StreamRunner) and self.num_stages == 1 else 0

    @property
    def num_stages(self) -> int:
        """The devices that compute a pass one after the other."""
        return len(self.stages)

    @property
    def max_batch_seqs(self) -> int | None:
        """Sequences that one pass may have; None where only their tokens count."""
        if isinstance(self.runner, StreamRunner):
            return MOST_STREAMS
        return most_splade_seqs(self.config.vocab_size) if self.network.vector_head.is_wide else None

    @property
    def max_graph_tokens(self) -> int:
        """Batches of up to so many tokens run as CUDA graphs; 0 on a CPU."""
        return 0 if isinstance(self.runner, CpuRunner | Pipeline) else self.runner.max_graph_tokens

    @property
    def longest_input(self) -> int:
        """Tokens of the longest input that there is memory for; at most the model's limit."""
        tried = self.runner.longest_input if isinstance(self.runner, CudaRunner) else None
        return self.config.max_input_length if tried is None else tried

    @property
    def shares_host_memory(self) -> bool:
        """Whether a pass takes memory that the rest of the machine takes from too."""
        return self.device.type == "cpu" or is_integrated(self.device)

    @property
    def used_bytes(self) -> int:
        """Bytes of the devices' memory that this process has taken."""
        devices = {stage.device for stage in self.stages}
        in_blocks = 0 if self._sleeper is None else sum(map(self._sleeper.held_bytes, devices))
        return in_blocks + sum(map(reserve.used_bytes, devices))

    def planned_bytes(self, max_batch_tokens: int | None) -> int:
        """What a plan counts for this model's `used_bytes`. `max_batch_tokens` is the operator's, None without one."""
        cache_tokens = None if self.pages is None else self.pages.num_pages * PAGE_SIZE
        return sum(planned_bytes(each.config, self.dtype, each.device, max_batch_tokens, cache_tokens) for each in self.stages)

    @property
    def dtype_name(self) -> DtypeName:
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)


def sleeper_of(parts: Loaded, devices: Sequence[torch.device]) -> Sleeper | None:
    """Moves the weights to memory that a sleeping engine frees.

    Returns: None for devices that share the host's memory, and if a GPU lacks the memory for a tensor more while they move.
    """
    if any(device.type == "cpu" or is_integrated(device) for device in devices):
        return None
    sleeper = Sleeper()
    try:
        sleeper.adopt(tensors_of(parts.network, parts.earlier))
    except BackendError as error:  # the tensors keep the blocks that they have moved to
        log.warning("the engine cannot sleep: %s", error)
        return None
    return sleeper
