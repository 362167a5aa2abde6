"""`emberforge generate --check`: compares the engine's tokens with those of transformers, both in fp32 on the CPU."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.model.quantized.scheme import Quantization
from engine.packages import install
from serve_app.cli.console import console, say

# Texts in several scripts, with digits and code, as in usual requests.
_PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 5, 8, 13,",
    "Das Wetter in Zürich ist heute",
    "水は摂氏100度で",
)
# The largest difference of log-probabilities that fp32 sums in another order explain.
_MOST_DIFFERENCE = 1e-3


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparison of one answer of the engine with transformers' log-probabilities for it."""

    num_tokens: int
    num_other: int  # tokens at which transformers prefers another token by more than rounding errors
    difference: float  # the largest difference of log-probabilities


def check(model: str, num_tokens: int) -> None:
    """Prints a line for each prompt. Raises: ModelError if a token or log-probability differs by more than rounding errors."""
    with console.status(f"comparing {model} with transformers"):
        compared = compare(model, num_tokens)
    for prompt, each in zip(_PROMPTS, compared, strict=True):
        same = f"{each.num_tokens - each.num_other} of {each.num_tokens} tokens are those of transformers"
        say(f"{same}, log-probabilities differ by at most {each.difference:.1e}: {prompt!r}")
    if any(each.num_other or each.difference > _MOST_DIFFERENCE for each in compared):
        raise ModelError(f"{model}: the engine does not generate the same tokens as transformers; please report this")


def compare(model: str, num_tokens: int) -> list[Compared]:
    """Compares greedy answers to the prompts above."""
    try:
        import transformers
    except ImportError as error:
        how = install("'emberforge[transformers]'")
        raise ModelError(f"--check compares with transformers: {how}") from error
    import torch

    from engine import Engine
    from engine.hub import resolve_model
    from engine.options import SamplingOptions

    folder = resolve_model(model)
    engine = Engine.load(folder, dtype="float32", device="cpu")
    if engine.prompts is None:
        raise ModelError(f"{model} does not generate text")
    prompts = [engine.prompts.encode(prompt) for prompt in _PROMPTS]
    answers = engine.generate(prompts, SamplingOptions(max_tokens=num_tokens, temperature=0.0, logprobs=1))
    scheme = engine.config.quantization
    del engine
    if scheme is not None or (folder / "model.gguf").exists():
        theirs = _of_our_weights(folder, scheme)
    else:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    compared = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = [*prompt.tolist(), *(token.id for token in answer.tokens)]
        with torch.inference_mode():
            logprobs = theirs(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(ids[len(prompt) :]).unsqueeze(1)).squeeze(1)
        difference = (chosen - torch.tensor([token.logprob for token in answer.tokens])).abs().max()
        others = logprobs.amax(1) > chosen + 2 * difference
        compared.append(Compared(len(answer.tokens), int(others.sum()), float(difference)))
    return compared


def _of_our_weights(folder: Path, scheme: Quantization | None) -> Any:
    """transformers' model with the weights that our code reads from a GGUF file or a quantised checkpoint.

    transformers' own readers need further packages, and some of them quantise activations.
    """
    import torch
    import transformers

    from engine.model.weights import Checkpoint

    make: Any = transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.from_pretrained(folder).get_text_config()
    config.quantization_config = None
    network = make.from_config(config, dtype=torch.float32)
    with Checkpoint(folder, torch.device("cpu"), torch.float32, scheme=scheme) as checkpoint:
        checkpoint.leave_out_images()
        weights = {name: tensor.float() for name, tensor in checkpoint.take_all().items()}
        missing, unknown = network.load_state_dict(weights, strict=False)
    lacking = set(missing) - ({"lm_head.weight"} if network.config.tie_word_embeddings else set())
    if lacking or unknown:
        raise ModelError(f"{folder}: transformers does not know the weights {unknown}, and misses {sorted(lacking)}")
    return network.eval()
