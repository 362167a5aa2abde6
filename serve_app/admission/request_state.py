"""The QoS, the sizes and the measured times of a request."""

from collections.abc import Sequence
from time import perf_counter

from engine.options import TextOrIds
from engine.results import Embeddings
from serve_app.admission.inputs import Single, TextOrPair
from serve_app.admission.qos import Qos


class RequestState:
    """QoS, sizes and measured times of one request."""

    def __init__(self, inputs: Sequence[TextOrIds | TextOrPair], qos: Qos) -> None:
        self._start = perf_counter()
        self.qos = qos
        self.method = "single" if isinstance(inputs, Single) else "batch"
        self.num_inputs = len(inputs)
        self.num_chars = _num_chars(inputs)
        self.chars_to_tokenize = self.num_chars  # decides whether a thread tokenises
        self.num_tokens = 0
        self.tokenization_s = self._queue_s = self._inference_s = 0.0

    def tokenized(self, num_tokens: int) -> None:
        """Records that tokenisation has ended now."""
        self.tokenization_s = perf_counter() - self._start
        self.num_tokens = num_tokens

    def computed(self, results: Sequence[Embeddings]) -> None:
        """Records the longest wait and the longest inference among the request's jobs."""
        self._queue_s, self._inference_s = max(each.queue_s for each in results), max(each.inference_s for each in results)

    def seconds(self) -> tuple[float, float, float, float]:
        """Seconds of the whole request so far, of tokenisation, in the queue, and of inference."""
        return perf_counter() - self._start, self.tokenization_s, self._queue_s, self._inference_s

    def headers(self) -> dict[str, str]:
        """TEI's response headers. Times are whole milliseconds, rounded down."""
        total = str(int((perf_counter() - self._start) * 1000))
        return {
            "x-compute-type": "gpu+optimized",
            "x-compute-time": total,
            "x-compute-characters": str(self.num_chars),
            "x-compute-tokens": str(self.num_tokens),
            "x-total-time": total,
            "x-tokenization-time": str(int(self.tokenization_s * 1000)),
            "x-queue-time": str(int(self._queue_s * 1000)),
            "x-inference-time": str(int(self._inference_s * 1000)),
        }


def _num_chars(inputs: Sequence[TextOrIds | TextOrPair]) -> int:
    if tuple in map(type, inputs):
        return sum(sum(map(len, each)) if isinstance(each, tuple) else len(each) for each in inputs)
    return sum(map(len, inputs))  # five times as fast, because `map` calls `len` without Python code
