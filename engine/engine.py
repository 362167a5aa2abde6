"""`Engine`: one loaded model on one or several devices. Gives vectors and answers for token ids. Needs no server."""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.devices import DTYPES, DtypeName, compute_dtype, default_batch_tokens, is_integrated
from engine.errors import BackendError, EngineStopped, InvalidInput, ModelError, NotFinite, OutOfMemory
from engine.heads.splade import most_splade_seqs
from engine.kernels.tiles import LEAST_TILED, tiling
from engine.load import Loaded, choose, choose_all, read_config
from engine.load import load as load_parts
from engine.model.base import Model
from engine.model.config import Backend, KvCacheDtype, ModelConfig, OutputName, Pooling, with_kv_cache_dtype
from engine.model.footprint import MOST_STREAMS
from engine.model.slower_in_8_bits import slower_in_8_bits
from engine.options import Direction, EmbedOptions, EncodeOptions, Input, SamplingOptions, TokenIds, check_dimensions
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
from engine.run.later_stage import LaterStage, StageOptions
from engine.run.layers import Layers
from engine.run.pack import BatchPacker
from engine.run.pipeline import Pipeline
from engine.run.ring import Ring, Store
from engine.run.ring_pipeline import RingPipeline
from engine.run.ring_streams import RingStreams
from engine.run.runner import CpuRunner
from engine.run.sleep import Sleeper, tensors_of
from engine.run.stages import Stage, facts_of, plan_ring, plan_stages
from engine.run.streams import StreamPacker
from engine.run.tune import tune, tune_streams
from engine.schedule.cohort import CohortPass
from engine.schedule.pages import Pages
from engine.schedule.piece import Piece
from engine.schedule.queue import MOST_SEQS
from engine.schedule.request import Request
from engine.schedule.stream import Answer, Stream, Token
from engine.text.grammar import Compiler

log = logging.getLogger(__name__)

T = TypeVar("T")


class Engine:
    """One model, ready to run. Not thread-safe: only one thread at a time may call it (see `engine/loop.py`)."""

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
        ring: Ring | None = None,
        num_groups: int = 1,
    ) -> None:
        """
        Args:
            device: the device; of the last stage, if there are several.
            cache_tokens: the size of a generation model's cache.
            max_batch_tokens: decides the default size of that cache; None for a budget that warm-up finds.
            stages: the parts of the model, if it is on several devices. `config` is that of the whole model.
            speculate: as in `load`.
            sleeper: for an engine that can sleep: the result of `sleeper_of`, which holds the memory of weights and caches.
            ring: the connection to the later stages, if they are processes of their own. `stages` is then the first stage alone.
            num_groups: as in `engine.passes.Runner`.
        """
        if parts.prompts is not None and config.generation is not None:
            config = replace(config, generation=config.generation.ended_by(parts.prompts.eos_id, config.vocab_size))
        self._sleeper, self.num_groups = sleeper, num_groups
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
            self.packer = replace(self.packer, tiling=replace(self.packer.tiling, capability=LEAST_TILED))  # for its kernels
        self.runner: CpuRunner | CudaRunner | StreamRunner | Pipeline | RingPipeline  # a CudaPipeline is a StreamRunner
        if ring is not None:
            self.runner = self._in_ring(ring, cache)
        elif parts.earlier and caches:
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

    def _in_ring(self, ring: Ring, cache: KVCache | None) -> RingPipeline | RingStreams:
        """The runner of the first stage of a ring. It uses our kernels if they can compute the stage."""
        network, packer = self.network, self.packer
        if cache is None or packer.tiling is None:
            return RingPipeline(network, packer, Layers(network.model, packer, self.device, cache), self.device, ring)
        return RingStreams(network, StreamPacker.of(packer, network.model), cache, self.device, ring)

    def _pipeline(self, earlier: Sequence[Model], caches: Sequence[KVCache]) -> Pipeline | CudaPipeline:
        """The runner of a model in stages. It uses our kernels if they can compute each stage."""
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
        """The packer of the last stage, with tiles that the GPUs of all stages can compute."""
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
        later: Sequence[LaterStage] = (),
        address: str = "127.0.0.1",
        on_lost: Callable[[EngineStopped], None] | None = None,
    ) -> "Engine":
        """Loads a model folder, a Hub id, or the embedded model, and warms it up.

        On a CPU the warm-up is one run. On a GPU it finds the best token budget, and reserves the memory of the largest batch.

        Args:
            dtype: "auto" is bfloat16 if the device computes it natively, else float32. "float8" and "int8" are for the layers'
                matrices and their operands, "int4" is for the matrices. All other values are then in bfloat16.
            device: "auto" is the first GPU if there is one.
            devices: several devices of this machine, which get the model's layers in this order; instead of `device`. Only for
                decoders: they may generate, or give vectors or scores.
            pooling: for folders that name no pooling. With last_token, a generation model also embeds.
            default_prompt_name: the model's prompt for texts whose request names no prompt. It overrides the authors' choice.
            default_prompt: the text of that prompt, instead of its name.
            max_batch_tokens: token budget of one forward pass. None is the CPU's default, or the measured budget on a GPU.
            max_input_tokens: a limit of an input below the model's own. Longer inputs are cut or refused, and need no memory.
            cache_tokens: tokens of a generation model's cache. None chooses the size by the free memory.
            kv_cache_dtype: "fp8" and "int8" keep keys and values in 8 bits, for twice the tokens (docs/decisions/054); "auto"
                keeps them in the dtype of the model.
            speculate: verify several tokens of an answer in one pass, if the earlier text predicts them (docs/decisions/049).
            sleeps: the engine can sleep, if its GPUs have their own memory: see `sleep`.
            num_threads: CPU threads of one operation; None keeps torch's own choice.
            backend: "transformers" runs the network of transformers, for architectures that our engine does not have. It is
                slower, and transformers must be installed.
            trust_remote_code: with that backend, run the code in the model's folder.
            on_download: gets the downloaded share of the files' bytes, during a download from the Hub.
            on_progress: gets the loaded share of the tensors, during the load.
            later: further stages, each in a process of its own, in the order of the layers. This process is the first stage. Only
                for decoders. Call `close` at the end.
            address: of this machine, by which the later stages reach it.
            on_lost: called when the process of a later stage is lost, after all passes under way have failed.
        Raises: ModelError with the file and what to do.
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
        num_groups = 1
        if later:
            options = StageOptions(str(model), _name(chosen), pooling, max_batch_tokens, max_input_tokens, kv_cache_dtype)
            return cls._load_first(
                later, options, folder, config, where[0], cache_tokens, speculate, address, on_progress, on_lost
            )
        with ExitStack() as reserved, torch.inference_mode():
            for each in dict.fromkeys(where):
                reserved.enter_context(reserve.reservation(each))
            if len(where) > 1:
                stages, cache_tokens, num_groups = plan_stages(config, chosen, where, max_batch_tokens, cache_tokens)
                log.info("layers by device: %s", ", ".join(f"{each.device} {len(each.config.layers)}" for each in stages))
            elif config.generation is not None:
                check_generator_fits(config, chosen, where[0], str(folder), max_batch_tokens, cache_tokens)
            last = stages[-1].config if stages else config
            parts = load_parts(folder, last, chosen, where[-1], on_progress, stages[:-1])
            sleeper = sleeper_of(parts, where) if sleeps else None
            engine = cls(
                config, parts, chosen, where[-1], cache_tokens, max_batch_tokens, stages, speculate, sleeper,
                num_groups=num_groups,
            )  # fmt: skip
            engine.warm_up(max_batch_tokens)
        return engine

    @classmethod
    def _load_first(
        cls,
        later: Sequence[LaterStage],
        options: StageOptions,
        folder: Path,
        config: ModelConfig,
        device: torch.device,
        cache_tokens: int | None,
        speculate: bool,
        address: str,
        on_progress: Callable[[float], None] | None,
        on_lost: Callable[[EngineStopped], None] | None,
    ) -> "Engine":
        """Loads the first stage of a ring while the later stages load theirs."""
        num_stages, dtype = len(later) + 1, DTYPES[options.dtype]
        with ExitStack() as reserved, torch.inference_mode():
            opened = [each.open(options, num_stages) for each in later]
            facts = [facts_of(config, dtype, device, num_stages, options.max_batch_tokens, address), *_all(opened)]
            layers, cache_tokens, num_groups = plan_ring(config, dtype, facts, device.type == "cuda", cache_tokens)
            where = zip(facts, layers, strict=True)
            log.info("layers by stage: %s", ", ".join(f"{each.name} {len(part)}" for each, part in where))
            loading = [each.load(part, cache_tokens) for each, part in zip(later, layers[1:], strict=True)]
            reserved.enter_context(reserve.reservation(device))
            first = Stage(replace(config, part=layers[0]), device)
            parts = load_parts(folder, first.config, dtype, device, on_progress)
            _all(loading)
            store = Store(address, num_stages)
            for index, each in enumerate(later, 1):
                each.run(store.place(index))
            ring = Ring(store.place(0), address, device, compute_dtype(dtype), config.hidden_size, store)
            budget = options.max_batch_tokens
            engine = cls(config, parts, dtype, device, cache_tokens, budget, [first], speculate, ring=ring, num_groups=num_groups)
            try:
                engine.warm_up(options.max_batch_tokens)
            except BaseException:
                engine.close()
                raise
            if isinstance(engine.runner, RingPipeline | RingStreams):
                engine.runner.on_lost = on_lost
        return engine

    def close(self) -> None:
        """Ends the stages in other processes. No pass may be under way, and none may follow."""
        if isinstance(self.runner, RingPipeline | RingStreams):
            self.runner.close()

    def warm_up(self, max_batch_tokens: int | None) -> None:
        """Compiles the kernels before the first request, and raises ModelError for a broken model."""
        if self.config.generation is not None:
            return self._warm_up_streams(max_batch_tokens)
        self.max_batch_tokens = max_batch_tokens or self.max_batch_tokens
        if isinstance(self.runner, CudaRunner):  # first, so that `tune` compiles all kernels
            self.max_batch_tokens = tune(self.runner, self.config, self.dtype, max_batch_tokens, self.max_batch_seqs)
            self.tokenizer.limit_to(self.longest_input)  # a longer input would fail, out of memory
            log.info("token budget %d, CUDA graphs up to %d tokens", self.max_batch_tokens, self.max_graph_tokens)
        if not self.launch(self.tokenizer.encode(["warm up"], EncodeOptions())).wait().finite.all():
            raise ModelError(
                f"the model gives vectors that are not finite in {self.dtype_name}; try --dtype float32 or check the weights"
            )

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

    def prepare_grammars(self) -> None:
        """As `Compiler.prepare`. Does nothing for a model that does not generate."""
        if self._grammars is not None:
            self._grammars.prepare()

    def embed(
        self,
        inputs: Sequence[Input],
        *,
        prompt_name: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        truncate: bool = True,
        truncation_direction: Direction | None = None,
    ) -> NDArray[np.float32]:
        """Embeds texts, or token ids without changes, in as many forward passes as the budget needs.

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
        """The fastest way for a query. None if one pass is not enough, or if a vector is not finite."""
        num_seqs = len(sequences)
        if not 0 < num_seqs <= self.max_batch_seqs or sum(map(len, sequences)) > self.max_batch_tokens:
            return None
        try:
            output = self.launch(sequences, [options] * num_seqs).wait()
        except OutOfMemory:
            return None
        return output.vectors if output.finite.all() else None

    def _embed_in_passes(self, sequences: Sequence[TokenIds], options: EmbedOptions) -> Vectors:
        """Computes as many passes as the budget and the memory need. Raises: BackendError naming the first input that failed."""
        requests = [Request([ids], options) for ids in sequences]
        # Longest first, so that every pass has sequences of similar lengths, and the largest pass comes first.
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
        """Continues prompts of token ids, all in the same passes.

        Returns: an answer for each prompt, in order.
        Raises: InvalidInput naming the fault of a prompt or of the options; BackendError.
        """
        streams = [self.new_stream(prompt, options) for prompt in prompts]
        Passes(self, self.max_batch_tokens, self.max_batch_seqs).run(streams)
        return [stream.future.result() for stream in streams]

    def stream(self, prompt: Sequence[int] | TokenIds, options: SamplingOptions) -> Iterator[Token]:
        """Continues one prompt, token by token. Raises: as `generate`."""
        stream = self.new_stream(prompt, options)
        try:
            sent = 0
            for _ in Passes(self, self.max_batch_tokens, self.max_batch_seqs).steps([stream]):
                yield from stream.answer[sent:]
                sent = len(stream.answer)
            stream.future.result()
        finally:
            stream.future.cancel()  # frees the pages if the caller has left

    def new_stream(self, prompt: Sequence[int] | TokenIds, options: SamplingOptions) -> Stream:
        """A stream for `EngineLoop.submit`. Its answer ends at the end of the model's context at the latest.

        Raises: InvalidInput for options out of range, ids outside of the vocabulary, a prompt longer than the model's context,
            and a grammar that does not compile.
        """
        stream = Stream.begin(prompt, options, self.config.vocab_size, self.config.max_input_length)
        if options.grammar is not None and self._grammars is not None:
            stream.matcher = self._grammars.matcher(options.grammar, stream.options)
        if self.speculate and isinstance(self.runner, CpuRunner | StreamRunner) and self.runner.speculation_rows:
            stream.speculate(self.runner.trusted_from)
        return stream

    def launch(
        self,
        sequences: Sequence[TokenIds],
        options: Sequence[EmbedOptions] | None = None,
        outputs: tuple[OutputName, ...] = (),
        pieces: Sequence[Piece] = (),
        together: CohortPass | None = None,
    ) -> Flight:
        """Starts one forward pass of at least one sequence or piece, of any size. On a CPU the pass has ended on return.

        An engine that sleeps wakes up first.

        Args:
            options: one for each sequence; None asks for whole, normalised vectors.
            outputs: all outputs besides vectors that any of the sequences asks for, sorted. Every sequence gets all of them.
            pieces: the parts of streams and sequences to compute. Only for a generation model, which takes no `sequences`.
            together: further tokens to compute, of the streams of a cohort.
        Raises: OutOfMemory if the pass does not fit; BackendError; DeviceLost if the device cannot be used any more; InvalidInput
            for an output that the model does not give, or a span outside of its sequence (`check_outputs` finds them earlier).
        """
        if self.asleep:
            self.wake()
        with torch.inference_mode():
            if isinstance(self.runner, StreamRunner):
                return self.runner.launch(sequences, options, outputs, pieces, together)
            return self.runner.launch(sequences, options, outputs, *([pieces] if pieces else []))

    @torch.inference_mode()
    def sleep(self) -> bool:
        """Frees the memory of weights and cache on the GPUs. The weights stay in pinned memory of the host. The cache is lost.

        No pass may be in flight.
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
        assert self._sleeper is not None, "only an engine that can sleep sleeps"
        log.info("awake after %.2f s", self._sleeper.wake())

    @property
    def asleep(self) -> bool:
        return self._sleeper is not None and self._sleeper.asleep

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> Tensor:
        """The last hidden states, after the final norm: [T, hidden_size] in the engine's dtype. Not for several devices."""
        assert self.num_stages == 1, "the model has only its last layers here"
        return self.network.model.forward(batch)

    @property
    def model(self) -> Model:
        return self.network.model

    @property
    def passes_in_flight(self) -> int:
        """The number of passes to launch before the first one has ended: a GPU gets the next pass while it computes."""
        return self.runner.passes_in_flight

    @property
    def speculation_rows(self) -> int:
        """As in `engine.passes.Runner`."""
        return 0 if isinstance(self.runner, CudaRunner) else self.runner.speculation_rows

    @property
    def cohort_size(self) -> int:
        """As in `engine.passes.Runner`."""
        return MOST_STREAMS if isinstance(self.runner, StreamRunner) and self.num_stages == 1 else 0

    @property
    def num_stages(self) -> int:
        """The number of devices that compute a pass one after the other."""
        return self.runner.num_stages if isinstance(self.runner, RingPipeline | RingStreams) else len(self.stages)

    @property
    def max_batch_seqs(self) -> int:
        """The most sequences of a pass."""
        if isinstance(self.runner, StreamRunner):
            return MOST_STREAMS
        return min(MOST_SEQS, most_splade_seqs(self.config.vocab_size)) if self.network.vector_head.is_wide else MOST_SEQS

    @property
    def max_graph_tokens(self) -> int:
        """The most tokens of a batch that runs as a CUDA graph; 0 on a CPU."""
        return self.runner.max_graph_tokens if isinstance(self.runner, CudaRunner | StreamRunner) else 0

    @property
    def longest_input(self) -> int:
        """Tokens of the longest input that fits into memory; at most the model's limit."""
        tried = self.runner.longest_input if isinstance(self.runner, CudaRunner) else None
        return self.config.max_input_length if tried is None else tried

    @property
    def shares_host_memory(self) -> bool:
        """Whether passes take memory that the rest of the machine also uses."""
        return self.device.type == "cpu" or is_integrated(self.device)

    @property
    def used_bytes(self) -> int:
        """Bytes of the devices' memory that this process uses."""
        devices = {stage.device for stage in self.stages}
        in_blocks = 0 if self._sleeper is None else sum(map(self._sleeper.held_bytes, devices))
        return in_blocks + sum(map(reserve.used_bytes, devices))

    def planned_bytes(self, max_batch_tokens: int | None) -> int:
        """The value of `used_bytes` in a plan for this model. `max_batch_tokens` is the operator's; None if it is not set."""
        cache_tokens = None if self.pages is None else self.pages.num_pages * PAGE_SIZE
        return sum(planned_bytes(each.config, self.dtype, each.device, max_batch_tokens, cache_tokens) for each in self.stages)

    @property
    def dtype_name(self) -> DtypeName:
        return _name(self.dtype)


def _name(dtype: torch.dtype) -> DtypeName:
    return next(name for name, each in DTYPES.items() if each == dtype)


def _all(futures: Sequence[Future[T]]) -> list[T]:
    """The results of all later stages. Raises: the first error."""
    return [each.result() for each in futures]


def sleeper_of(parts: Loaded, devices: Sequence[torch.device]) -> Sleeper | None:
    """Moves the weights into memory that a sleeping engine can free.

    Returns: None for devices that share the host's memory, and if a GPU lacks the memory to hold a tensor twice during the move.
    """
    if any(device.type == "cpu" or is_integrated(device) for device in devices):
        return None
    sleeper = Sleeper()
    try:
        sleeper.adopt(tensors_of(parts.network, parts.earlier))
    except BackendError as error:  # tensors that were moved stay there
        log.warning("the engine cannot sleep: %s", error)
        return None
    return sleeper
