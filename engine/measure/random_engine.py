"""An engine of any shape with random weights, made on its device: measuring needs no download and no file."""

from collections.abc import Callable, Sequence

import torch
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models
from torch import Tensor

from engine.engine import Engine
from engine.errors import ModelError
from engine.heads.language import LanguageHead
from engine.heads.pool import Pool
from engine.kernels import Weight
from engine.load import assemble, choose
from engine.model.config import ModelConfig
from engine.model.families import family_of
from engine.model.quantized.layout import FourBits
from engine.run import reserve
from engine.run.fits import check_generator_fits
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

    def to_layer_dtype(self, weight: Tensor | FourBits) -> Weight:
        assert isinstance(weight, Tensor), "it gives no others"
        return weight

    def derive(self, shape: tuple[int, ...], compute: Callable[[], Tensor]) -> Tensor:
        return compute()


def random_engine(config: ModelConfig, device: str = "auto", cache_tokens: int | None = None) -> Engine:
    """An engine that is warm and ready, in the dtype that it would choose for a checkpoint.

    Args:
        config: of a model that gives vectors, or generates; without dense layers, a classifier's head or a masked-LM head.
        cache_tokens: of a model that generates.
    Raises: ModelError where the device has too little memory.
    """
    if config.head is not None or config.dense or config.splade is not None:
        raise ModelError(f"{config.architecture} with a head of its own cannot have random weights here")
    dtype, where = choose(config, "auto", device)
    with reserve.reservation(where), torch.inference_mode():
        if config.generation is not None:
            check_generator_fits(config, dtype, where, config.architecture, None, cache_tokens)
        weights = RandomWeights(where, dtype, decodes=config.generation is not None)
        model = family_of(config)(config, weights)
        language_head, prompts = None, None
        tokenizer = HFTokenizer(models.WordLevel(_WORDS, unk_token="[UNK]"))  # noqa: S106 - a token of text
        if config.generation is not None:
            words = model.words if config.generation.tied else weights.take("lm_head", config.vocab_size, config.hidden_size)
            language_head = LanguageHead(words, weights.decodes)
            prompts = Prompts(tokenizer, None)
        pool = Pool(config.pooling)
        parts = assemble(config, model, pool, {}, language_head, Tokenizer(tokenizer, config), prompts, dtype, where)
        engine = Engine(config, parts, dtype, where, cache_tokens)
        engine.warm_up(None)
    return engine
