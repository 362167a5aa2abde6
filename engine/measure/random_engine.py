"""Makes an engine of any shape with random weights, so that a measurement needs no download and no file."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models as word_models

from engine.devices import current
from engine.engine import Engine, sleeper_of
from engine.errors import ModelError
from engine.heads.language import LanguageHead
from engine.heads.pool import Pool
from engine.load import Loaded, assemble, choose_all
from engine.model.base import Model
from engine.model.config import ModelConfig
from engine.model.families import family_of
from engine.model.random_weights import RandomWeights
from engine.run import reserve
from engine.run.fits import check_generator_fits
from engine.run.stages import Stage, plan_stages
from engine.text.prompts import Prompts
from engine.text.tokenizer import Tokenizer

_WORDS = {"[UNK]": 0, "warm": 1, "up": 2}


def random_engine(
    config: ModelConfig,
    device: str = "auto",
    cache_tokens: int | None = None,
    devices: Sequence[str] = (),
    sleeps: bool = False,
) -> Engine:
    """Makes an engine and warms it up, in the dtype that the engine would choose for a checkpoint.

    Args:
        config: a model that gives vectors or generates, without dense layers, a classifier's head or a masked-LM head.
        cache_tokens: for a generation model.
        devices: several devices, which get the layers in this order; instead of `device`.
        sleeps: as in `Engine.load`.
    Raises: ModelError if the devices have too little memory.
    """
    if config.head is not None or config.dense or config.splade is not None:
        raise ModelError(f"{config.architecture} with a head of its own cannot have random weights here")
    dtype, where = choose_all(config, "auto", devices or [device])
    with ExitStack() as reserved, torch.inference_mode():
        for each in dict.fromkeys(where):
            reserved.enter_context(reserve.reservation(each))
        stages: list[Stage] = []
        num_groups = 1
        if len(where) > 1:
            stages, cache_tokens, num_groups = plan_stages(config, dtype, where, None, cache_tokens)
        elif config.generation is not None:
            check_generator_fits(config, dtype, where[0], config.architecture, None, cache_tokens)
        parts = _random_parts(config, stages or [Stage(config, where[0])], dtype)
        sleeper = sleeper_of(parts, where) if sleeps else None
        engine = Engine(config, parts, dtype, where[-1], cache_tokens, stages=stages, sleeper=sleeper, num_groups=num_groups)
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
