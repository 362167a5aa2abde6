"""Measures answers with and without speculation, in turns on one engine: edited code, summaries, and free text.

python -m loadtests.speculation            # SmolLM2, on a GPU if there is one
python -m loadtests.speculation MODEL ...  # SmolLM2, and random weights at the shapes of other models, which need a GPU

A model with random weights gives the answers that are written down here: after its head, the logit of the next token of the
answer is set to a large value. So its passes take their real time, and the answers repeat what such answers repeat.
"""

import gc
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor

from engine import Engine
from engine.heads.language import LanguageHead
from engine.hub import EMBEDDED_GENERATOR, resolve_model
from engine.loop import EngineLoop
from engine.options import SamplingOptions
from engine.passes import BatchReport
from engine.run.streams import StreamShape
from loadtests.checkpoints import Published, save
from loadtests.generate import MODELS
from loadtests.report import write

ROUNDS = 5
SMOLLM2 = "SmolLM2"
CODE = '''class Store:
    """Keeps values by key, and forgets the oldest ones beyond a limit."""

    def __init__(self, limit):
        self.limit = limit
        self.values = {}

    def get(self, key, default=None):
        value = self.values.get(key, default)
        return value

    def put(self, key, value):
        if key in self.values:
            del self.values[key]
        self.values[key] = value
        while len(self.values) > self.limit:
            oldest = next(iter(self.values))
            del self.values[oldest]

    def remove(self, key):
        if key in self.values:
            del self.values[key]
'''
REPORT = """The bridge over the river was closed on Monday after an inspection found cracks in two of its steel girders. The
city's engineers said that the cracks had grown since the last inspection in spring, and that the bridge would stay closed for at
least three months. About forty thousand vehicles cross the bridge on a working day. Buses use the northern bridge instead, which
adds twenty minutes to the trip. The mayor asked companies to let people work from home where they can. Repairs are expected to
cost four million euros, of which the state pays half."""
TASKS = {
    "code editing": f"Rewrite this Python code. Rename the class to `Cache`, and change nothing else.\n\n```python\n{CODE}```",
    "summarising with quotes": f"Quote the three most important sentences of this text word for word.\n\n{REPORT}",
    "free text": "Write a story about a lighthouse keeper who finds a message in a bottle.",
}
# Written by hand, as a good model would answer.
SUMMARY = """The bridge over the river is closed for at least three months, because an inspection found cracks in two of its
steel girders that had grown since spring. About forty thousand vehicles cross it on a working day. Buses use the northern
bridge, which adds twenty minutes to a trip, and the mayor asks companies to let people work from home. Repairs are expected to
cost four million euros, and the state pays half."""
QUOTES = " ".join(re.split(r"(?<=\.) ", REPORT.replace("\n", " "))[index] for index in (0, 1, 5))
ALICE = Path(__file__).with_name("alice.txt").read_text(encoding="utf-8")
ANSWERS = {
    "code editing": (TASKS["code editing"], f"```python\n{CODE.replace('class Store', 'class Cache')}```"),
    "summarising with quotes": (TASKS["summarising with quotes"], QUOTES),
    "summarising in other words": (f"Summarise this text.\n\n{REPORT}", SUMMARY),
    "free text": (f"Continue this story.\n\n{ALICE[:2000]}", ALICE[2000:3000]),
}
MOST_TOKENS = 200
LARGE = 1e4  # larger than all logits of random weights


@dataclass
class Clock:
    """The times of the tokens of all streams."""

    times: list[float] = field(default_factory=list)

    def token(self, _: object) -> None:
        self.times.append(perf_counter())

    @property
    def rate(self) -> float:
        """Tokens/s after the first token."""
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])


class Subject:
    """An engine with its loop, as a replica has them."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.reports = engine, list[BatchReport]()
        self.loop = EngineLoop(engine, engine.max_batch_tokens, None, self.reports.append, max_batch_seqs=engine.max_batch_seqs)

    def run(self, given: Sequence[Any], options: Sequence[SamplingOptions], speculate: bool) -> tuple[float, list[list[int]]]:
        """Tokens/s, and the answers."""
        self.engine.speculate = speculate
        self.reports.clear()
        clock, streams = Clock(), []
        for prompt, each in zip(given, options, strict=True):
            streams.append(self.engine.new_stream(prompt, each))
            streams[-1].on_token = clock.token
        self.loop.submit(streams)
        answers = [[token.id for token in stream.future.result().tokens] for stream in streams]
        return clock.rate, answers

    def compare(self, given: Sequence[Any], options: Sequence[SamplingOptions]) -> dict[str, Any]:
        """Medians over rounds in turn. A first round captures graphs and fills the cache."""
        rates: dict[bool, list[float]] = {True: [], False: []}
        found: dict[str, Any] = {}
        for number in range(ROUNDS + 1):
            answers = []
            for speculate, of_rounds in rates.items():
                rate, texts = self.run(given, options, speculate)
                of_rounds += [rate] if number else []
                answers.append(texts)
                if speculate:
                    proposed = sum(each.num_proposed for each in self.reports)
                    accepted = sum(each.num_accepted for each in self.reports)
                    found = {"passes": len(self.reports), "proposed": proposed, "accepted": accepted}
        with_it, without = median(rates[True]), median(rates[False])
        return {
            "tokens": sum(map(len, answers[0])),
            "tokens/s without": without,
            "with": with_it,
            "with / without": with_it / without,
            **found,
            "accepted of proposed": found["accepted"] / found["proposed"] if found["proposed"] else "-",
            "same answers": "yes" if answers[0] == answers[1] else "no",
        }


def of_smollm2() -> Iterator[dict[str, Any]]:
    engine = Engine.load(resolve_model(EMBEDDED_GENERATOR))
    assert engine.prompts is not None, "the model generates"
    assert engine.config.generation is not None, "the model generates"
    options = SamplingOptions(max_tokens=MOST_TOKENS, temperature=0.0, stop_ids=engine.config.generation.eos_ids)
    subject = Subject(engine)
    for name, task in TASKS.items():
        prompt = engine.prompts.encode_chat([{"role": "user", "content": task}])
        yield {"model": f"SmolLM2-135M, {engine.dtype_name}", "task": name, "streams": 1, **subject.compare([prompt], [options])}
    subject.loop.stop()


class Recorded:
    """Gives all rows of all passes the tokens of one recorded text, by position. All streams have the same prompt."""

    def __init__(self, context: int) -> None:
        self.following = torch.zeros(context, dtype=torch.int64, device="cuda")  # the token behind each position
        self.last = threading.local()  # `rows`: the positions of the rows of the pass that this thread computes or captures

    def record(self, text: Sequence[int]) -> None:
        self.following[: len(text) - 1] = torch.tensor(text[1:], device="cuda")

    @contextmanager
    def patched(self) -> Iterator[None]:
        """The engine must be loaded inside, because CUDA graphs are captured during the load."""
        view, narrow = StreamShape.view, LanguageHead.narrow

        def view_and_keep(shape: StreamShape, buffer: Tensor, *others: Any) -> Any:
            self.last.rows = shape.part(buffer, "positions").index_select(0, shape.part(buffer, "pooled_rows"))
            return view(shape, buffer, *others)

        def narrow_and_choose(head: LanguageHead, hidden: Tensor) -> Tensor:
            logits, rows = narrow(head, hidden), getattr(self.last, "rows", None)
            if rows is None or len(rows) != len(hidden):  # while the load measures the head
                return logits
            return logits.scatter_(1, self.following[rows.long()].unsqueeze(1), LARGE)

        with patch.object(StreamShape, "view", view_and_keep), patch.object(LanguageHead, "narrow", narrow_and_choose):
            yield


def of_random_weights(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    config = transformers.Qwen3Config(**MODELS[name].config.to_dict())
    save(Published(config, MODELS[name].model_class, "last_token"), folder)
    tokenizer = Tokenizer.from_file(str(resolve_model(EMBEDDED_GENERATOR, weights=False) / "tokenizer.json"))
    recorded = Recorded(config.max_position_embeddings)
    with recorded.patched():
        engine = Engine.load(folder, dtype="bfloat16", cache_tokens=64_000, num_threads=1)
        subject = Subject(engine)
        for task, (question, answer) in ANSWERS.items():
            prompt, wanted = (tokenizer.encode(text).ids for text in (question, answer))
            recorded.record(prompt + wanted)
            options = SamplingOptions(max_tokens=len(wanted), temperature=0.0)
            for count in (1, 4, 8, 16):
                given = [prompt] * count, [options] * count
                found = subject.compare(*given)
                _, answers = subject.run(*given, speculate=True)
                assert answers == [wanted] * count, f"the answers are not the recorded ones: {answers}"
                yield {"model": f"{name}'s shape, bf16", "task": task, "streams": count, **found}
                print(f"{name}, {count} streams, {task}: {found}", file=sys.stderr, flush=True)
        subject.loop.stop()


def main(names: Sequence[str]) -> None:
    notes = [
        f"{ROUNDS} rounds in turn on one engine, medians, behind the first token; SmolLM2's answers have up to {MOST_TOKENS} "
        "tokens",
        "all answers are greedy; SmolLM2 answers itself; random weights give answers that are written by hand, from the texts of "
        "the prompts, and a part of Alice in Wonderland (free text), all in SmolLM2's tokens",
        "in 16 bits a pass of several rows rounds otherwise than a pass of one, so answers may differ",
    ]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as path:
        for name in names or (SMOLLM2,):
            rows += of_smollm2() if name == SMOLLM2 else of_random_weights(name, Path(path) / name)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.set_per_process_memory_fraction(1.0)  # the engine has limited it
    result = "speculation_gpu" if torch.cuda.is_available() else "speculation"
    write(result, " ".join(["python -m loadtests.speculation", *names]), {"Speculation": rows}, notes)


if __name__ == "__main__":
    main(sys.argv[1:])
