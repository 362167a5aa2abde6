"""Vectors of inputs seen before, in front of a replica's queue: what is found here waits for nobody."""

from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b

import numpy as np
from cachetools import LRUCache

from engine.loop import Embeddings
from engine.options import EmbedOptions, TokenIds
from engine.run.flight import Vectors
from serve_app.metrics import Metrics
from serve_app.models import ServedModel
from serve_app.terms import Terms

# What an entry takes besides its vector's numbers: key, array, and their places in the cache.
ENTRY_BYTES = 500

_Key = tuple[bytes, EmbedOptions]


class CachedModel:
    """A model whose vectors are kept, the least recently used given up for new ones. A replica has one model and a cache of its
    own, so that token ids and options tell vectors apart.

    Only the event loop calls it, so nothing is locked. What it gives is bit for bit what a pass once gave; computed again, in
    other company, a vector may differ by rounding.
    """

    def __init__(self, model: ServedModel, max_bytes: int, metrics: Metrics) -> None:
        self.info, self.tokenizer = model.info, model.tokenizer
        self._model = model
        self._vectors: LRUCache[_Key, Vectors] = LRUCache(max_bytes, getsizeof=lambda vector: vector.nbytes + ENTRY_BYTES)
        self._hits, self._misses = metrics.cache_hits, metrics.cache_misses
        metrics.cache_bytes.set_function(lambda: self._vectors.currsize)

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, terms: Terms) -> Embeddings:
        """As `ServedModel.embed`; only vectors are kept: what else one text may ask for would displace hundreds."""
        if options.outputs or not options.pooled or not terms.store:
            return await self._model.embed(sequences, options, terms)
        keys = [(blake2b(ids.tobytes(), digest_size=32).digest(), options) for ids in sequences]
        found = [self._vectors.get(key) for key in keys]
        missing = [index for index, vector in enumerate(found) if vector is None]
        self._hits.inc(len(found) - len(missing))
        self._misses.inc(len(missing))
        if not missing:
            return Embeddings(np.stack([vector for vector in found if vector is not None]), {}, 0.0, 0.0)
        computed = await self._model.embed([sequences[index] for index in missing], options, terms)
        assert computed.vectors is not None, "they were asked for"
        for index, vector in zip(missing, computed.vectors, strict=True):
            found[index] = vector
            with suppress(ValueError):  # larger than the whole cache
                self._vectors[keys[index]] = vector.copy()  # a row alone would hold its request's whole array
        vectors = np.stack([vector for vector in found if vector is not None])
        return Embeddings(vectors, {}, computed.queue_s, computed.inference_s)
