"""A cache of vectors before a replica's queue. An input with a cached vector needs no forward pass."""

from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b

import numpy as np
from cachetools import LRUCache

from engine.options import EmbedOptions, TokenIds
from engine.results import Embeddings
from engine.run.flight import Vectors
from serve_app.admission.qos import Qos
from serve_app.models import ServedModel
from serve_app.observe.metrics import Metrics

# Bytes of an entry besides the numbers of the vector: the key, the array object, and the cache's own records.
ENTRY_BYTES = 500

_Key = tuple[bytes, EmbedOptions, str]


class CachedModel:
    """A model with a cache of its vectors. New vectors replace the least recently used ones.

    The token ids, the options and the API key's name identify an entry. Without the name, the time of an answer would show a key
    what other keys have sent. A replica has one model. Only the event loop calls the cache, so it needs no lock. A cached vector
    is exactly the vector of an earlier pass. A vector that is computed again in another batch may differ by rounding.
    """

    def __init__(self, model: ServedModel, max_bytes: int, metrics: Metrics, shared: bool = False) -> None:
        """`shared`: an entry answers all API keys."""
        self.info, self.tokenizer = model.info, model.tokenizer
        self._model, self._shared = model, shared
        self._vectors: LRUCache[_Key, Vectors] = LRUCache(max_bytes, getsizeof=lambda vector: vector.nbytes + ENTRY_BYTES)
        self._hits, self._misses = metrics.cache_hits, metrics.cache_misses
        metrics.cache_bytes.set_function(lambda: self._vectors.currsize)

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        """Like `ServedModel.embed`. Only vectors are cached, because other results are as large as hundreds of vectors."""
        if options.outputs or not options.pooled or not qos.store:
            return await self._model.embed(sequences, options, qos)
        owner = "" if self._shared else qos.owner
        keys = [(blake2b(ids.tobytes(), digest_size=32).digest(), options, owner) for ids in sequences]
        found = [self._vectors.get(key) for key in keys]
        missing = [index for index, vector in enumerate(found) if vector is None]
        self._hits.inc(len(found) - len(missing))
        self._misses.inc(len(missing))
        if not missing:
            return Embeddings(np.stack([vector for vector in found if vector is not None]), {}, 0.0, 0.0)
        computed = await self._model.embed([sequences[index] for index in missing], options, qos)
        assert computed.vectors is not None, "the request asked for vectors"
        for index, vector in zip(missing, computed.vectors, strict=True):
            found[index] = vector
            with suppress(ValueError):  # the vector is larger than the whole cache
                self._vectors[keys[index]] = vector.copy()  # a copy, because a slice would keep the request's whole array alive
        vectors = np.stack([vector for vector in found if vector is not None])
        return Embeddings(vectors, {}, computed.queue_s, computed.inference_s, computed.num_passes)
