"""Runs passes of streams on one GPU: chunks of prompts, and one token of each stream.

All work runs in order on one CUDA stream. A pass leaves the chosen tokens on the device, and the next pass reads them there. So
the next pass is launched before these tokens are on the host.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine import kernels
from engine.draws import SLOT, Row
from engine.heads.sampler import Sampling, adjust
from engine.heads.scores import score_prompts
from engine.kernels.attention_decode import DecodeWorkspace, most_items
from engine.model.config import OutputName
from engine.options import EmbedOptions, TokenIds
from engine.run.batch import PackedBatch
from engine.run.cuda import Staging, cuda_errors
from engine.run.flight import NO_VECTORS, Flight, Output
from engine.run.graphs import GraphPool, Graphs
from engine.run.kv_cache import KVCache
from engine.run.network import Network
from engine.run.streams import MOST_GRAPH_ROWS, Laid, StreamPacker, StreamShape, rows_of
from engine.schedule.cohort import CohortPass
from engine.schedule.piece import Piece
from engine.schedule.proposer import TRUSTED_FROM
from engine.schedule.stream import Token, token_of

Key = tuple[StreamShape, tuple[()]]


class Replayed(Protocol):
    """A captured pass."""

    def replay(self) -> None: ...


_NO_PICKS = np.zeros(0, np.int32)
# Pages of the streams of a pass that runs as a graph. The streams of a larger pass may share pages; it runs without a graph.
MOST_PAGES = 32_768


@dataclass(slots=True)
class Extra:
    """Tokens and scores computed by torch operations. n = rows that need more than the sampler's kernel."""

    indices: list[int]  # the indices of these rows among the rows that choose a token
    sampled: Tensor  # [n, 4], in the form of `kernels.sample`
    logprobs: Tensor  # [n] float32, the log-probabilities of the chosen tokens
    top: tuple[Tensor, Tensor]  # [n, most]: ids and log-probabilities of the likeliest tokens
    named: list[Tensor | None]  # log-probabilities of `SamplingOptions.logprobs_of`

    def add_to(self, tokens: list[Token | None], rows: Sequence[Row]) -> None:
        """Replace the kernel's tokens, which were chosen without masks, bias and penalties."""
        chosen = tokens_of(self.sampled.cpu().numpy(), [rows[index] for index in self.indices])
        columns = self.logprobs.tolist(), *(each.tolist() for each in self.top), self.named
        for index, token, logprob, ids, values, named in zip(self.indices, chosen, *columns, strict=True):
            tokens[index] = token
            if token is None:
                continue
            most = rows[index].options.logprobs
            if most is not None:
                token = token._replace(logprob=logprob, top=tuple(zip(ids[:most], values[:most], strict=True)))
            tokens[index] = token if named is None else token._replace(logprobs_of=tuple(named.tolist()))


@dataclass(slots=True)
class StreamFlight:
    """A launched pass. `wait` may be called once."""

    sampled: Tensor  # [rows, 4], in pinned memory
    num_together: int  # the number of the first rows, which are the streams of a cohort
    picks: NDArray[np.int32]  # the other rows that choose a token
    chosen: list[Row]
    extra: Extra | None
    scores: Sequence[Sequence[Token] | None]
    vectors: Tensor | None  # [n, embedding_size], in pinned memory; None if no piece is pooled
    devices: Sequence[torch.device]  # of all stages
    staging: Staging
    idle: deque[Staging]

    @property
    def done(self) -> bool:
        try:
            return bool(self.staging.end.query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True  # `wait` raises it

    def synchronize(self) -> None:
        with suppress(RuntimeError):  # `wait` raises it
            self.staging.end.synchronize()

    def wait(self) -> Output:
        with cuda_errors("a forward pass", *self.devices):
            self.staging.end.synchronize()
            device_s = self.staging.start.elapsed_time(self.staging.end) / 1e3
            sampled = self.sampled.numpy()
            together, tokens = sampled[: self.num_together].copy(), tokens_of(sampled[self.picks], self.chosen)
            if self.extra is not None:
                self.extra.add_to(tokens, self.chosen)
        vectors = NO_VECTORS if self.vectors is None else self.vectors.numpy().copy()
        self.idle.append(self.staging)
        return Output(vectors, device_s=device_s, tokens=tokens, together=together, scores=self.scores)


class StreamRunner:
    """Runs passes of streams on one GPU. Not thread-safe, except that any thread may wait for flights."""

    passes_in_flight, num_stages = 3, 1  # decode steps are short, and the host is late at times
    speculation_rows = 64  # for up to 64 rows the weights are read once, the same as for one row
    trusted_from = TRUSTED_FROM  # for streams that speculate; `tune_streams` finds both numbers for the model

    def __init__(self, network: Network, packer: StreamPacker, cache: KVCache, device: torch.device) -> None:
        assert network.language_head is not None, "only a model that generates has streams"
        self._network, self._model, self._head, self._device = network, network.model, network.language_head, device
        self.packer, self._cache = packer, cache
        self._devices: tuple[torch.device, ...] = (device,)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = GraphPool(device)
        self.graphs: Graphs[Key, Replayed] = Graphs(self._capture)
        self._idle = deque[Staging]()
        self._workspace = self._new_workspace(most_items(MOST_GRAPH_ROWS, packer.tiling.n_kv_heads, packer.num_blocks))
        self._last = torch.zeros(cache.num_pages, dtype=torch.int32, device=device)
        self._buffer = torch.zeros(0, dtype=torch.int32, device=device)  # of all graphs
        self._sampled = torch.zeros(MOST_GRAPH_ROWS, 4, dtype=torch.int32, device=device)  # of all graphs
        self._hidden: Tensor | None = None  # of all graphs, [MOST_GRAPH_ROWS, C]
        self.max_graph_tokens = 0  # `tune_streams` finds the sizes for which graphs pay

    def launch(
        self,
        sequences: Sequence[TokenIds],
        options: Sequence[EmbedOptions] | None = None,
        outputs: tuple[OutputName, ...] = (),
        pieces: Sequence[Piece] = (),
        together: CohortPass | None = None,
    ) -> Flight:
        """Queue one pass over the streams of a cohort and the pieces. Raises: OutOfMemory, BackendError, DeviceLost."""
        assert not sequences, "a generation model gets only pieces"
        laid = Laid(pieces, together)
        is_scored = any(piece.scored is not None for piece in pieces)
        graphed = laid.num_tokens <= self.max_graph_tokens and len(laid.pages) <= MOST_PAGES and not is_scored
        shape = self.packer.shape(laid, graphed)
        key: Key = shape, ()
        graphed = graphed and shape.num_seqs <= MOST_GRAPH_ROWS and self.graphs.may_have(key)
        graph = self.graphs.find(key) if graphed else None
        if graph is None:
            shape = self.packer.shape(laid, graphs=False)
        scores: list[list[Token] | None] = []
        what = f"a pass of {len(laid)} streams, {laid.num_tokens} tokens"
        with torch.inference_mode(), cuda_errors(what, *self._devices), self._stream:
            staging = self._idle.pop() if self._idle else Staging()
            filled = staging.take(shape.size + len(laid.pages), torch.int32)
            self.packer.fill(filled.numpy(), shape, laid)
            staging.start.record(self._stream)
            before = self._run_before(laid, shape, filled, staging, graph)
            if graph is not None:
                self._buffer[: len(filled)].copy_(filled, non_blocking=True)
                graph.replay()
                assert self._hidden is not None
                hidden, sampled = self._hidden[: shape.num_seqs], self._sampled[: shape.num_seqs]
            else:
                buffer = filled.to(self._device, non_blocking=True)
                hidden, sampled, scores = self._compute(shape, buffer, pieces if is_scored else (), before, laid.num_together)
            picks = rows_of(shape, laid, laid.chooses)[laid.num_together :] if laid.chosen else _NO_PICKS
            extra = self._extra(hidden, shape, filled, picks, laid.chosen)
            self._chosen(laid)
            vectors = self._vectors(hidden, rows_of(shape, laid, laid.pools), laid.pooled, staging) if laid.pooled else None
            host = staging.take(sampled.numel(), torch.int32, "results").view(sampled.shape).copy_(sampled, non_blocking=True)
            staging.end.record(self._stream)
        if graphed and graph is None:
            self.graphs.want(key)
        return StreamFlight(
            host, laid.num_together, picks, laid.chosen, extra, scores, vectors, self._devices, staging, self._idle
        )

    # Pipelines override these (`engine/run/cuda_pipeline.py`, `ring_streams.py`).

    def _run_before(
        self, laid: Laid, shape: StreamShape, filled: Tensor, staging: Staging, graph: Replayed | None
    ) -> Tensor | None:
        """Queues the stages before this one. Returns: the hidden states [T, C] that an eager pass begins with, if any."""
        return None

    def _forward(self, batch: PackedBatch, pooled_only: bool) -> Tensor:
        """The hidden states of this stage: [T, C], with `pooled_only` [B, C]."""
        return self._model.forward(batch, pooled_only=pooled_only)

    def _chosen(self, laid: Laid) -> None:
        """Called when the choice of the pass's tokens is queued."""

    def _graph_input(self, shape: StreamShape) -> Tensor | None:
        """The place of the hidden states [T, C] that graphs of this shape begin with, if any."""
        return None

    def _new_workspace(self, items: int) -> DecodeWorkspace:
        tiling = self.packer.tiling
        return DecodeWorkspace.create(items, tiling.group * tiling.n_kv_heads, tiling.head_dim, self._device)

    def _compute(
        self,
        shape: StreamShape,
        buffer: Tensor,
        scored: Sequence[Piece] = (),
        before: Tensor | None = None,
        num_together: int = 0,
    ) -> tuple[Tensor, Tensor, list[list[Token] | None]]:
        """The hidden states [rows, C], the chosen tokens [rows, 4], and the scores of prompts.

        Args:
            scored: all pieces of the pass, if one of them is scored. They come after the `num_together` tokens of a cohort.
        """
        workspace = self._workspace
        if shape.num_items > len(workspace.counters):
            workspace = self._new_workspace(shape.num_items)
        batch, choices = shape.view(buffer, self._cache.layers, workspace, self._last)
        batch = replace(batch, hidden=before)
        scores: list[list[Token] | None] = []
        if scored:
            whole = self._forward(batch, pooled_only=False)
            scores = score_prompts(whole[num_together:], scored, self._head)
            hidden = whole.index_select(0, batch.pooled_rows)
        else:
            hidden = self._forward(batch, pooled_only=shape.num_chunk_tokens > 0)
        return hidden, kernels.sample(self._head.narrow(hidden), choices, self._last), scores

    def _capture(self, key: Key, eager_first: bool) -> Replayed:
        """Captures a pass over `_buffer`. Its results go to `_hidden` and `_sampled`.

        Raises: RuntimeError, or its subclass torch.OutOfMemoryError.
        """
        shape, _ = key
        with torch.inference_mode(), torch.cuda.device(self._device):
            room = shape.size + MOST_PAGES
            if len(self._buffer) < room:  # the buffer cannot be replaced, because earlier graphs read its address
                raise RuntimeError(f"a graph's batch takes {room} numbers, there is room for {len(self._buffer)}")
            if eager_first:  # a capture can neither compile kernels nor load a library's
                self.run_padding(shape)
            assert self._hidden is not None
            hidden_place, sampled_place = self._hidden[: shape.num_seqs], self._sampled[: shape.num_seqs]

            def compute() -> None:
                batch, choices = shape.view(self._buffer, self._cache.layers, self._workspace, self._last)
                batch = replace(batch, hidden=self._graph_input(shape))
                hidden = self._forward(batch, pooled_only=shape.num_chunk_tokens > 0)
                kernels.sample(self._head.narrow(hidden), choices, self._last, sampled_place)
                hidden_place.copy_(hidden)

            return self._pool.capture(compute, new_thread=not eager_first)

    @torch.inference_mode()
    def run_padding(self, shape: StreamShape) -> None:
        """Queues a pass of this shape without streams, and without a graph."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._compute(shape, self._padding(shape), before=self._graph_input(shape))

    def _padding(self, shape: StreamShape) -> Tensor:
        """The buffer of a batch without streams."""
        buffer = torch.zeros(shape.size + 1, dtype=torch.int32, device=self._device)
        fill_padding(buffer, shape)
        return buffer

    def prepare_graphs(self, largest: Sequence[StreamShape], hidden_size: int, dtype: torch.dtype) -> None:
        """Reserve the memory that all graphs share. `largest`: one of these shapes needs the largest buffer."""
        room = max(shape.size for shape in largest) + MOST_PAGES
        with torch.inference_mode():
            self._buffer = torch.zeros(room, dtype=torch.int32, device=self._device)
            self._hidden = torch.zeros(MOST_GRAPH_ROWS, hidden_size, dtype=dtype, device=self._device)

    def _extra(
        self, hidden: Tensor, shape: StreamShape, filled: Tensor, picks: NDArray[np.int32], chosen: Sequence[Row]
    ) -> Extra | None:
        """Choose again for rows with masks, bias or penalties. Compute the log-probabilities that the options ask for."""
        indices = [index for index, row in enumerate(chosen) if _needs_more(row)]
        if not indices:
            return None
        rows = [chosen[index] for index in indices]
        at = picks[indices]
        logits = self._head(hidden.index_select(0, torch.from_numpy(at).to(self._device)))  # [n, V]
        choices = shape.choices_in(filled.numpy())[at]
        adjusted = adjust(logits, Sampling.of(rows, logits.shape[1], self._device))
        sampled = kernels.sample(adjusted, torch.from_numpy(choices).to(self._device), self._last)
        log_probs = logits.log_softmax(1)
        most = max((row.options.logprobs or 0 for row in rows), default=0)
        top = log_probs.topk(most)
        named = [
            log_probs[index][torch.tensor(row.options.logprobs_of, device=self._device)] if row.options.logprobs_of else None
            for index, row in enumerate(rows)
        ]
        logprobs = log_probs.gather(1, sampled[:, :1].long()).squeeze(1)
        return Extra(indices, sampled, logprobs, (top.indices, top.values), named)

    def _vectors(self, hidden: Tensor, rows: NDArray[np.int32], options: Sequence[EmbedOptions], staging: Staging) -> Tensor:
        """Queues the vectors of these rows, and their copy to pinned memory."""
        filled = staging.take(3 * len(rows), torch.int32, "pooled").view(3, -1)
        filled.numpy()[0], filled.numpy()[1:] = rows, self._network.finishing(options)
        where, *finishing = filled.to(self._device, non_blocking=True)
        vectors = self._network.finish(hidden.index_select(0, where), finishing)
        return staging.take(vectors.numel(), torch.float32, "vectors").view(vectors.shape).copy_(vectors, non_blocking=True)


def fill_padding(buffer: Tensor, shape: StreamShape) -> None:
    """Turns a buffer of zeros into a batch without streams. The batch stores nothing in the cache."""
    for part, column in (("slots", slice(None)), ("choices", (slice(None), SLOT))):
        shape.part(buffer, part)[column] = -1


def _needs_more(row: Row) -> bool:
    options = row.options
    narrowed = row.counts is not None or row.banned or row.allowed is not None or options.allowed is not None
    return bool(narrowed or options.logit_bias or options.logprobs or options.logprobs_of)


def tokens_of(sampled: NDArray[np.int32], rows: Sequence[Row]) -> list[Token | None]:
    """The chosen tokens. None for rows whose logits are not finite. `sampled`: [n, 4] in the form of `kernels.sample`."""
    ids, finite = sampled[:, 0].tolist(), sampled[:, 1]
    if finite.all() and all(row.options.logprobs is None for row in rows):
        return [token_of(each) for each in ids]
    logprobs = sampled[:, 2].copy().view(np.float32).tolist()
    return [
        None if not fine else Token(token) if row.options.logprobs is None else Token(token, logprob, ())
        for token, fine, logprob, row in zip(ids, finite.tolist(), logprobs, rows, strict=True)
    ]
