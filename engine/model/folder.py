"""Reads a Hugging Face model folder into a `ModelConfig`: config.json by its family, and the files of sentence-transformers."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

from tokenizers import Tokenizer as HFTokenizer

from engine.errors import InvalidInput, ModelError
from engine.model.config import (
    Backend,
    DenseActivation,
    DenseConfig,
    HeadConfig,
    ModelConfig,
    Pooling,
    SpladeConfig,
    WordHeadConfig,
    named_prompt,
)
from engine.model.families import MODELS, Transformers
from engine.model.families.transformers import TransformersConfig
from engine.model.generation import read_generation
from engine.model.gguf import read_header
from engine.model.gguf_codes import described
from engine.model.keys import Keys, is_causal, read_json, read_labels, read_object
from engine.model.quantized.quantization_config import read_scheme
from engine.model.quantized.scheme import Quantization
from engine.model.weight_files import read_linear
from engine.model.weight_paths import only_gguf
from engine.model.with_images import ARCHITECTURES, language_model
from engine.text.pairs import DEFAULT_INSTRUCTION, JUDGE

log = logging.getLogger(__name__)


def load_model_config(
    folder: Path,
    pooling: Pooling | None = None,
    *,
    default_prompt_name: str | None = None,
    default_prompt: str | None = None,
    max_input_tokens: int | None = None,
    backend: Backend = "emberforge",
    trust_remote_code: bool = False,
) -> ModelConfig:
    """Read `config.json` and the files of sentence-transformers beside it.

    Args:
        folder: a model folder in the Hub's layout.
        pooling: overrides the folder's own pooling. It is necessary if the folder names none. A generation model also embeds with
            last_token, and only embeds with another pooling.
        default_prompt_name: the prompt of texts whose request names none. It overrides the folder's own choice.
        default_prompt: the same as a text.
        max_input_tokens: a limit of an input below the model's own, or for a model without a limit.
        backend: the implementation of the network.
        trust_remote_code: whether transformers may run the folder's own code.
    Raises: ModelError naming the file, the key and a way out.
    """
    if (adapter := folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{adapter}: adapters (LoRA) are not supported; merge the adapter into its model, for example with peft's "
            "merge_and_unload, or remove the file if the weights already have it"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json: it is not a model folder in the Hugging Face layout")
    keys = Keys.read(path)
    if backend == "emberforge":
        keys = language_model(keys)
    if keys.architecture == "JinaBertModel" and _is_named(folder, pooling, "jina-reranker-v1"):
        # config.json names only the body, but the weights contain a head. The model card's code loads it with one label.
        keys = Keys(path, keys.values | {"architectures": ["JinaBertForSequenceClassification"], "num_labels": 1})
    keys.refuse("transformers_weights", (None, "model.safetensors"), "the weights must be in files of the usual names")
    prompts, own_default = _read_prompts(folder)
    if default_prompt_name is not None:
        try:
            default_prompt = named_prompt(prompts, default_prompt_name)
        except InvalidInput as error:
            raise ModelError(f"{folder}: {error}") from None
    if default_prompt is None:
        default_prompt = own_default
    if backend == "transformers":
        config = _read_embedder(folder, keys, Transformers.read_config(keys, trust_remote_code), pooling)
    elif keys.architecture in MODELS:
        config = MODELS[keys.architecture].read_config(keys)
        if trust_remote_code and keys.get("auto_map"):
            log.warning("%s: our own %s is used; --backend transformers runs the folder's code", folder, keys.architecture)
        head = _read_head(folder, keys, pooling)
        if head is not None:
            config = _with_head(folder, keys, config, head, default_prompt)
        elif _generates(folder, keys, pooling) and _read_head(folder, keys, None) is None:  # a reranker does not generate
            path = folder / "generation_config.json"
            generation = read_generation(keys, Keys.read(path))
            config = replace(config, pooling="last_token", generation=replace(generation, embeds=pooling is not None))
        else:
            config = _read_embedder(folder, keys, config, pooling)
    else:
        raise ModelError(
            f"{keys.path}: architecture {keys.architecture} is not supported; supported are "
            f"{', '.join(sorted((*MODELS, *ARCHITECTURES)))}; "
            "others may run, slower, with --backend transformers"
        )
    _check_transformer_module(folder, config)
    _check_cuts(folder, config)
    limit, lower_case = _read_transformer_module(folder, config.max_position_embeddings or max_input_tokens)
    lexical, colbert_size = _read_token_layers(folder, config)
    return replace(
        config,
        max_position_embeddings=config.max_position_embeddings or limit,
        max_input_length=min(limit, max_input_tokens or limit),
        lower_case=lower_case,
        lexical=lexical,
        colbert_size=colbert_size,
        prompts=prompts,
        default_prompt=default_prompt,
        quantization=_read_quantization(folder, keys),
    )


def _read_quantization(folder: Path, keys: Keys) -> Quantization | None:
    """The storage of the matrices, from config.json or the header of a GGUF file. None if they are not quantised."""
    if (gguf := only_gguf(folder)) is None:
        return read_scheme(keys)
    return described(read_header(gguf))


def _read_embedder(folder: Path, keys: Keys, config: ModelConfig, pooling: Pooling | None) -> ModelConfig:
    """`config` with the folder's pooling and the layers after it. A given `pooling` overrides the folder's."""
    pooling_folder, is_splade, dense = _read_modules(folder, config.hidden_size)
    pooling = pooling or ("splade" if is_splade else _read_pooling(folder, pooling_folder, config.hidden_size))
    splade = None
    if pooling == "splade":
        if isinstance(config, TransformersConfig):
            raise ModelError(f"{keys.path}: pooling splade is not supported with backend transformers; leave the backend out")
        splade = _read_splade(keys, pooling_folder if is_splade else None, dense)
    return replace(config, pooling=pooling, dense=dense, splade=splade)


def _generates(folder: Path, keys: Keys, pooling: Pooling | None) -> bool:
    """Whether the folder is a causal language model without settings for vectors.

    With pooling last_token the model also embeds. Other poolings need all tokens of a sequence in one pass, but passes with
    streams cut sequences into chunks. With other poolings the model only embeds.
    """
    silent = not any((folder / file).exists() for file in ("modules.json", "1_Pooling"))
    shares_passes = pooling in (None, "last_token")
    return silent and shares_passes and keys.architecture.endswith("ForCausalLM") and is_causal(keys)


def _with_head(
    folder: Path, keys: Keys, config: ModelConfig, head: HeadConfig | WordHeadConfig, default_prompt: str | None
) -> ModelConfig:
    """`config` of a classifier or a reranker. A default prompt is the instruction of a reranker with a chat template."""
    answers = isinstance(head, WordHeadConfig)
    labels = ("LABEL_0",) if answers else read_labels(keys)
    problem = keys.get("problem_type")
    return replace(
        config,
        pooling=head.pooling,
        head=head,
        labels=labels,
        multi_label=problem == "multi_label_classification",
        regression=problem == "regression" and len(labels) > 1,
        padding_id=keys.get("pad_token_id") if head.pooling == "last_token" and not answers else None,
        instruction=(default_prompt or DEFAULT_INSTRUCTION) if _uses_chat_template(folder, answers, default_prompt) else None,
    )


# sentence-transformers reads the first of these files that is not empty.
_TRANSFORMER_FILES = tuple(
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


def _transformer_module(folder: Path) -> Keys:
    """The settings of sentence-transformers' Transformer module."""
    found = (Keys.read(folder / name) for name in _TRANSFORMER_FILES)
    return next((each for each in found if each.values), Keys(folder / _TRANSFORMER_FILES[0], {}))


def _read_transformer_module(folder: Path, positions: int | None) -> tuple[int, bool]:
    """(max_input_length, lower_case) from the Transformer module. A position table limits the length."""
    module = _transformer_module(folder)
    limit = module.get("max_seq_length")
    if limit is None:
        limit = _tokenizer_limit(folder, positions)
    if not isinstance(limit, int) or limit <= 0:
        raise ModelError(f"{module.path}: max_seq_length is {limit!r}, expected a positive whole number")
    return min(limit, positions or limit), bool(module.get("do_lower_case"))


# Values of settings that change no vector here: batches have no padding, and long texts are always truncated.
_NEUTRAL = {"trust_remote_code": (True, False), "padding": (True,), "padding_side": ("left", "right"), "truncation": (True,)}


def _check_transformer_module(folder: Path, config: ModelConfig) -> None:
    """Stop if the Transformer module has a setting that changes vectors and that we do not have."""
    module = _transformer_module(folder)
    for key in ("query_length", "document_length", "query_expansion"):
        module.refuse(key, (None,), "queries and documents have one limit")
    # Older names come second.
    for key in ("config_kwargs", "config_args", "processor_kwargs", "tokenizer_args"):
        _check_neutral(module, key, _NEUTRAL)
    processing = Keys(module.path, module.mapping("processing_kwargs"))
    for key in ("common", "text"):
        _check_neutral(processing, key, _NEUTRAL)
    _check_neutral(processing, "chat_template", {"add_generation_prompt": (True,)})
    modalities = Keys(module.path, module.mapping("modality_config"))
    if config.embeds and modalities.get("message") is not None:
        raise ModelError(f"{module.path}: message in modality_config is not supported (no chat template around texts to embed)")
    outputs = ("logits",) if config.head else ("last_hidden_state", "logits") if config.splade else ("last_hidden_state",)
    Keys(module.path, modalities.mapping("text")).refuse("method_output_name", (*outputs, None), f"only {' or '.join(outputs)}")


def _check_cuts(folder: Path, config: ModelConfig) -> None:
    """Stop if sentence-transformers would cut each vector. Here only a request cuts vectors."""
    keys = Keys.read(folder / "config_sentence_transformers.json")
    if config.splade is not None:
        keys.refuse("max_active_dims", (None,), "a sparse vector keeps all its entries; remove the key")
    elif config.embeds and (keys.get("truncate_dim") is None or keys.number("truncate_dim") < config.embedding_size):
        keys.refuse("truncate_dim", (None,), "a vector is cut by `dimensions` of its request; remove the key")


def _check_neutral(keys: Keys, key: str, neutral: dict[str, tuple[Any, ...]]) -> None:
    """Stop if the settings under `key` are more than these values."""
    for name, value in keys.mapping(key).items():
        if value is not None and value not in neutral.get(name, ()):
            raise ModelError(
                f"{keys.path}: {name} = {value!r} in {key} is not supported; remove it if the model does not need it"
            )


def _tokenizer_limit(folder: Path, positions: int | None) -> int | None:
    """`model_max_length`. transformers writes 1e30 for "not known"; the result is then `positions`."""
    limit = read_object(folder / "tokenizer_config.json").get("model_max_length")
    return int(limit) if isinstance(limit, int | float) and 0 < limit < 1e9 else positions


def _read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """The model's prompts by name, and the text of its authors' default prompt."""
    path = folder / "config_sentence_transformers.json"
    config = read_object(path)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path}: prompts must map names to strings")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise ModelError(f"{path}: default_prompt_name {default!r} is not one of the prompts {sorted(prompts)}")
    return prompts, None if default is None else prompts[default]


def _read_head(folder: Path, keys: Keys, pooling: Pooling | None) -> HeadConfig | WordHeadConfig | None:
    """The head of a classifier or a reranker; None for an embedding model (docs/decisions/016)."""
    head: HeadConfig | WordHeadConfig
    architecture = keys.architecture
    modules = _modules(folder)
    kinds = [kind for kind, _ in modules]
    family = MODELS[architecture]
    if architecture in family.classifiers:
        if kinds not in ([], ["Transformer"]):
            raise ModelError(
                f"{folder / 'modules.json'}: modules {kinds} are not supported for {architecture}: it has its own head"
            )
        head = family.read_head(keys)
    elif "LogitScore" in kinds:
        head = _read_logit_score(folder, keys, modules)
    elif architecture == "Qwen3ForCausalLM" and _is_named(folder, pooling, "qwen3-reranker"):
        head = _word_head(keys, _token_id(folder, "yes"), _token_id(folder, "no"))
    else:
        return None
    if pooling not in (None, head.pooling):
        log.warning("%s: pooling %s is not used: %s has a head that reads %s", folder, pooling, architecture, head.pooling)
    return head


def _is_named(folder: Path, pooling: Pooling | None, name: str) -> bool:
    """Whether a folder without a pooling has this name, or is the model of this name in the Hub's cache."""
    silent = pooling is None and not any((folder / file).exists() for file in ("modules.json", "1_Pooling"))
    model = folder.parent.parent.name if folder.parent.name == "snapshots" else folder.name
    return silent and name in model.lower().replace("_", "-")


def _read_logit_score(folder: Path, keys: Keys, modules: list[tuple[str, str]]) -> WordHeadConfig:
    """The head of a reranker with `LogitScore`. Source: `LogitScore` of sentence-transformers."""
    path, kinds = folder / "modules.json", [kind for kind, _ in modules]
    if keys.architecture != "Qwen3ForCausalLM" or kinds != ["Transformer", "LogitScore"]:
        raise ModelError(
            f"{path}: {kinds} of {keys.architecture} is not supported (only Transformer, LogitScore of Qwen3ForCausalLM)"
        )
    path = folder / Path(modules[1][1]).name / "config.json"
    module = Keys.read(path)
    module.refuse("module_input_name", ("causal_logits", None), "only the language model's logits")
    yes, no = module.get("true_token_id"), module.get("false_token_id")
    for name, token in (("true_token_id", yes), ("false_token_id", no)):
        if not (isinstance(token, int) and 0 <= token < keys.number("vocab_size")) and (name, token) != ("false_token_id", None):
            raise ModelError(f"{module.path}: {name} is {token!r}, expected a token of the vocabulary")
    return _word_head(keys, yes, no)


def _word_head(keys: Keys, yes: int, no: int | None) -> WordHeadConfig:
    return WordHeadConfig(tied=bool(keys.get("tie_word_embeddings")), yes=yes, no=no)


def _check_asks_as_qwen3(folder: Path, default_prompt: str | None) -> None:
    """Raises: ModelError if the folder's chat template is not that of `InstructTemplate`, or has another instruction."""
    path = folder / "chat_template.jinja"
    template = path.read_text(encoding="utf-8") if path.is_file() else None
    template = template or str(read_object(folder / "tokenizer_config.json").get("chat_template"))
    parts = (JUDGE.split('"', 1)[0], "<Instruct>: ", "<Query>: ", "<Document>: ", "<think>", "</think>")
    if not all(part in template for part in parts):
        raise ModelError(f"{folder}: pairs go through a chat template that is not Qwen3-Reranker's, the only one supported")
    if not default_prompt and DEFAULT_INSTRUCTION not in template:
        raise ModelError(
            f"{folder}: the default instruction of the chat template is not Qwen3-Reranker's; give it with --default-prompt"
        )


def _token_id(folder: Path, word: str) -> int:
    try:
        token = HFTokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(word)
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{folder / 'tokenizer.json'} cannot be loaded: {error}") from error
    if token is None:
        raise ModelError(f"{folder / 'tokenizer.json'}: no token {word!r}; a reranker of this name answers with it")
    return int(token)


def _uses_chat_template(folder: Path, answers: bool, default_prompt: str | None) -> bool:
    """Whether pairs go through a chat template, by the rules of sentence-transformers.

    Raises: ModelError for a template that we do not have, and for its own default instruction without a default prompt.
    """
    if not (folder / "modules.json").exists():
        return answers
    modalities = _transformer_module(folder).get("modality_config")
    uses = answers if modalities is None else "message" in modalities
    if uses:
        _check_asks_as_qwen3(folder, default_prompt)
    return uses


# The order of sentence-transformers' modules. Only Dense may come several times.
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
# The modules of a SparseEncoder, and the modules that they replace.
_SPARSE_MODULES = {"MLMTransformer": "Transformer", "SpladePooling": "Pooling"}


def _modules(folder: Path) -> list[tuple[str, str]]:
    """(kind, folder) of each module in modules.json. Dropout is left out, because it does nothing outside of training.

    Raises: ModelError for a module that is not sentence-transformers' own.
    """
    path = folder / "modules.json"
    modules = read_json(path) or []
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{path} must be a list of objects")
    for module in modules:
        if not str(module.get("type")).startswith("sentence_transformers."):
            raise ModelError(
                f"{path}: module {module.get('type')!r} is not supported, because it is not sentence-transformers' own"
            )
    found = [(module["type"].rsplit(".", 1)[-1], str(module.get("path", ""))) for module in modules]
    return [(kind, name) for kind, name in found if kind != "Dropout"]


def _read_modules(folder: Path, hidden_size: int) -> tuple[str, bool, tuple[DenseConfig, ...]]:
    """(folder of the pooling, whether the pooling is SPLADE's, the layers after it)."""
    path, pooling, is_splade, kinds = folder / "modules.json", "1_Pooling", False, ["Transformer"]
    dense: list[DenseConfig] = []
    for kind, name in _modules(folder):
        is_splade |= kind == "SpladePooling"
        kind = _SPARSE_MODULES.get(kind, kind)
        if kind not in _MODULES:
            raise ModelError(f"{path}: module {kind} is not supported yet")
        if _MODULES.index(kind) < _MODULES.index(kinds[-1]):
            raise ModelError(f"{path}: {kind} after {kinds[-1]} is not supported (the order is {', '.join(_MODULES)})")
        if name != Path(name).name:
            raise ModelError(f"{path}: {kind} has path {name!r}, expected the name of a folder beside it")
        kinds.append(kind)
        if kind == "Pooling":
            pooling = name
        if kind == "Dense":
            dense.append(_read_dense(folder, name, dense[-1].out_features if dense else hidden_size))
    return pooling, is_splade, tuple(dense)


def _read_splade(keys: Keys, name: str | None, dense: tuple[DenseConfig, ...]) -> SpladeConfig:
    """SPLADE's settings. `name`: the folder of the SpladePooling. None: the folder is a plain masked LM, pooled as in TEI."""
    folder, architecture = keys.path.parent, keys.architecture
    family = MODELS.get(architecture)
    if family is None or family.masked_lm is None or not architecture.endswith("ForMaskedLM"):
        able = (each for each in MODELS if each.endswith("ForMaskedLM") and MODELS[each].masked_lm is not None)
        raise ModelError(
            f"{keys.path}: pooling splade needs a masked-LM head, one of {', '.join(sorted(able))}; not {architecture}"
        )
    if dense:
        raise ModelError(f"{folder / 'modules.json'}: Dense after SPLADE is not supported")
    how = Keys(folder / (name or "") / "config.json", read_object(folder / name / "config.json") if name else {})
    how.refuse("pooling_strategy", ("max", None), "only the maximum of all tokens")
    how.refuse("activation_function", ("relu", "log1p_relu", None), "only relu and log1p_relu")
    for width in ("word_embedding_dimension", "embedding_dimension"):
        how.refuse(width, (keys.number("vocab_size"), None), "a vector is as wide as the vocabulary")
    return replace(family.read_masked_lm(keys), log_twice=how.get("activation_function") == "log1p_relu")


def _read_token_layers(folder: Path, config: ModelConfig) -> tuple[bool, int | None]:
    """BGE-M3's layers beside the weights: (whether there is a layer of lexical weights, the width of the ColBERT vectors)."""
    if config.architecture != "XLMRobertaModel":
        return False, None
    lexical, colbert = (read_linear(folder, name, config.hidden_size) for name in ("sparse_linear", "colbert_linear"))
    if lexical is not None and len(lexical[0]) != 1:
        raise ModelError(f"{folder}: sparse_linear gives {len(lexical[0])} weights for a token, expected one")
    return lexical is not None, None if colbert is None else len(colbert[0])


# FlagEmbedding gives these tokens no weight. The values are XLM-RoBERTa's names for them.
_NO_WORDS = {"cls_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def read_no_words(folder: Path) -> list[str]:
    """The tokens that are not words of a text, by the names in the tokenizer's files."""
    given: dict[str, Any] = dict(_NO_WORDS)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = read_object(folder / name)
        given |= {key: file[key] for key in _NO_WORDS if file.get(key)}
    return [token["content"] if isinstance(token, dict) else token for token in given.values()]


def _read_dense(folder: Path, name: str, width: int) -> DenseConfig:
    path = folder / name / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder / 'modules.json'} names a Dense layer in {name}, which has no config.json")
    keys = Keys.read(path)
    keys.refuse("use_residual", (False, None), "only plain layers")
    for key in ("module_input_name", "module_output_name"):
        keys.refuse(key, ("sentence_embedding", None), "only layers of whole vectors, after pooling")
    # The activation is recognised by its name and never imported. sentence-transformers' default is Tanh.
    activation = str(keys.get("activation_function", "torch.nn.modules.activation.Tanh"))
    package, _, kind = activation.rpartition(".")
    if kind not in get_args(DenseActivation) or not package.startswith("torch.nn."):
        raise ModelError(f"{path}: activation_function {activation} is not supported; supported are {get_args(DenseActivation)}")
    if keys.number("in_features") != width:
        raise ModelError(f"{path}: in_features is {keys.get('in_features')}, the module before has {width} dimensions")
    return DenseConfig(name, width, keys.number("out_features"), bool(keys.get("bias", True)), cast(DenseActivation, kind))


def _read_pooling(folder: Path, name: str, hidden_size: int) -> Pooling:
    path = folder / name / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} names no pooling (it has no {name}/config.json): "
            f"choose one of {', '.join(get_args(Pooling))} with --pooling; a reranker made from a language model needs the "
            f"modules.json of sentence-transformers' CrossEncoder, or Qwen3-Reranker in its folder's name"
        )
    config = read_object(path)
    if config.get("include_prompt", True) is not True:
        raise ModelError(
            f"{path}: include_prompt = false is not supported, because our poolings read a text with its prompt; "
            "if no text gets a prompt, choose the pooling with --pooling"
        )
    width = config.get("word_embedding_dimension", config.get("embedding_dimension", hidden_size))
    if width != hidden_size:
        raise ModelError(f"{path}: pooling expects {width} dimensions, the model has {hidden_size}")
    return _pooling_mode(path, config)


def _pooling_mode(path: Path, config: dict[str, Any]) -> Pooling:
    """The only mode that is set: `pooling_mode` (since sentence-transformers 5) or a `pooling_mode_*` flag."""
    named = {
        "mean": "mean",
        "cls": "cls",
        "lasttoken": "last_token",
        "max": "max",
        "mean_sqrt_len_tokens": "mean_sqrt_len",
        "weightedmean": "weighted_mean",
    }
    flags = {
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "cls",
        "pooling_mode_lasttoken": "lasttoken",
        "pooling_mode_max_tokens": "max",
        "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
        "pooling_mode_weightedmean_tokens": "weightedmean",
    }
    mode = config.get("pooling_mode")
    modes = list(map(str, mode if isinstance(mode, list) else [mode])) if mode else []
    modes = modes or [name for flag, name in flags.items() if config.get(flag)]
    if len(modes) != 1 or modes[0] not in named:
        raise ModelError(f"{path}: pooling {modes or 'nothing'} is not supported; supported is one of {list(named)}")
    return cast(Pooling, named[modes[0]])
