"""An engine of any shape with random weights, made on its device: measuring needs no download and no file."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models as word_models
from torch import Tensor

from engine.devices import current
from engine.engine import Engine
from engine.errors import ModelError
from engine.heads.language import LanguageHead
from engine.heads.pool import Pool
from engine.kernels import Weight
from engine.load import Loaded, assemble, choose_all
from engine.model.base import Model
from engine.model.config import ModelConfig
from engine.model.families import family_of
from engine.model.quantized.layout import FourBits
from engine.run import reserve
from engine.run.fits import check_generator_fits
from engine.run.stages import Stage, plan_stages
from engine.text.prompts import Prompts
from engine.text.tokenizer import Tokenizer

_DEVIATION = 0.02  # of the weights, as models are initialised; norms are around 1
_WORDS = {"[UNK]": 0, "warm": 1, "up": 2}


class RandomWeights:
    """A source of weights that gives random values for every name: as `WeightSource`."""

    def __init__(self, device: torch.device, dtype: torch.dtype, decodes: bool) -> None:
        self.device, self.dtype, self.decodes = device, dtype, decodes
        self._generator = torch.Generator(device).manual_seed(0)

    def strip_prefix(self, prefixes: Sequence[str], probe: str) -> None:
        pass

    def has(self, name: str) -> bool:
        return True

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        is_norm = "norm" in name.lower() and name.endswith("weight")
        values = torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        return values.normal_(float(is_norm), _DEVIATION, generator=self._generator)

    def take_embedding(self, name: str, *shape: int) -> Tensor:
        return self.take(name, *shape)

    def take_rows(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> Tensor:
        return self.take(names[0], sum(rows), *columns)

    def take_matrix(self, names: Sequence[str], rows: Sequence[int], columns: int) -> Tensor:
        return self.take(names[0], sum(rows), columns)

    def take_matrices(self, names: Sequence[str], rows: Sequence[int], columns: int) -> list[Tensor | FourBits]:
        return [self.take_matrix(names, rows, columns)]

    def to_layer_dtype(self, weight: Tensor | FourBits) -> Weight:
        assert isinstance(weight, Tensor), "it gives no others"
        return weight

    def derive(self, shape: tuple[int, ...], compute: Callable[[], Tensor]) -> Tensor:
        return compute()


def random_engine(
    config: ModelConfig, device: str = "auto", cache_tokens: int | None = None, devices: Sequence[str] = ()
) -> Engine:
    """An engine that is warm and ready, in the dtype that it would choose for a checkpoint.

    Args:
        config: of a model that gives vectors, or generates; without dense layers, a classifier's head or a masked-LM head.
        cache_tokens: of a model that generates.
        devices: several devices, which get the layers in this order; instead of `device`.
    Raises: ModelError where the devices have too little memory.
    """
    if config.head is not None or config.dense or config.splade is not None:
        raise ModelError(f"{config.architecture} with a head of its own cannot have random weights here")
    dtype, where = choose_all(config, "auto", devices or [device])
    with ExitStack() as reserved, torch.inference_mode():
        for each in dict.fromkeys(where):
            reserved.enter_context(reserve.reservation(each))
        stages: list[Stage] = []
        if len(where) > 1:
            stages, cache_tokens = plan_stages(config, dtype, where, None, cache_tokens)
        elif config.generation is not None:
            check_generator_fits(config, dtype, where[0], config.architecture, None, cache_tokens)
        parts = _random_parts(config, stages or [Stage(config, where[0])], dtype)
        engine = Engine(config, parts, dtype, where[-1], cache_tokens, stages=stages)
        engine.warm_up(None)
    return engine


def _random_parts(config: ModelConfig, stages: Sequence[Stage], dtype: torch.dtype) -> Loaded:
    models = list[Model]()
    for stage in stages:
        weights = RandomWeights(stage.device, dtype, decodes=config.generation is not None)
        with current(stage.device):
            models.append(family_of(stage.config)(stage.config, weights))
    last, language_head, prompts = stages[-1], None, None
    tokenizer = HFTokenizer(word_models.WordLevel(_WORDS, unk_token="[UNK]"))  # noqa: S106 - a token of text
    if config.generation is not None:
        tied, shape = config.generation.tied, (config.vocab_size, config.hidden_size)
        words = models[0].words.to(last.device) if tied else weights.take("lm_head", *shape)
        language_head = LanguageHead(words, weights.decodes)
        prompts = Prompts(tokenizer, None)
    pool, texts = Pool(config.pooling), Tokenizer(tokenizer, config)
    parts = assemble(last.config, models[-1], pool, {}, language_head, texts, prompts, dtype, last.device)
    return replace(parts, earlier=tuple(models[:-1]))
