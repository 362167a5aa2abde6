"""A Hugging Face model folder -> `ModelConfig`: config.json by its family, and the sentence-transformers files beside it."""

import json
from pathlib import Path
from typing import Any, cast, get_args

from engine.errors import InvalidInput, ModelError
from engine.model_config import Backend, DenseActivation, DenseConfig, Keys, ModelConfig, Pooling, named_prompt
from engine.models import MODELS, Model, Transformers


def load_model_config(
    folder: Path,
    pooling: Pooling | None = None,
    *,
    default_prompt_name: str | None = None,
    default_prompt: str | None = None,
    backend: Backend = "emberforge",
    trust_remote_code: bool = False,
) -> ModelConfig:
    """Read `config.json` and the sentence-transformers files beside it.

    Args:
        folder: a model folder as the Hub has it.
        pooling: overrides the folder's own pooling; needed where the folder names none.
        default_prompt_name: the prompt of texts whose request asks for none; overrides the folder's own choice.
        default_prompt: the same, as a text.
        backend: whose network is to run.
        trust_remote_code: whether the folder's own code may, with transformers.
    Raises: ModelError naming the file, the key and what would help.
    """
    hf = _read_json(folder / "config.json")
    if hf is None:
        raise ModelError(f"{folder} has no config.json: it is not a model folder in the Hugging Face layout")
    architectures = hf.get("architectures") or []
    architecture = architectures[0] if architectures else f"(none, model_type {hf.get('model_type')!r})"
    keys = Keys(folder / "config.json", hf)
    family: type[Model] = Transformers
    if backend == "transformers":
        fields = Transformers.read_config(keys, trust_remote_code)
    elif architecture in MODELS:
        family = MODELS[architecture]
        fields = family.read_config(keys)
    else:
        raise ModelError(
            f"{keys.path}: architecture {architecture} is not supported; supported are {', '.join(sorted(MODELS))}; "
            "others may run, slower, with --backend transformers"
        )
    prompts, own_default = _read_prompts(folder)
    if default_prompt_name is not None:
        try:
            default_prompt = named_prompt(prompts, default_prompt_name)
        except InvalidInput as error:
            raise ModelError(f"{folder}: {error}") from None
    pooling_folder, dense = _read_modules(folder, fields["hidden_size"])
    limit, lower_case = _read_transformer_module(folder, fields["max_position_embeddings"])
    fields["max_position_embeddings"] = fields["max_position_embeddings"] or limit
    return family.Config(
        architecture=architecture,
        pooling=pooling or _read_pooling(folder, pooling_folder, fields["hidden_size"]),
        dense=dense,
        max_input_length=limit,
        lower_case=lower_case,
        prompts=prompts,
        default_prompt=own_default if default_prompt is None else default_prompt,
        stored_dtype=str(keys.get("dtype", keys.get("torch_dtype", "float32")) or "float32"),
        **fields,
    )


def _read_transformer_module(folder: Path, positions: int | None) -> tuple[int, bool]:
    """(max_input_length, lower_case) from sentence_bert_config.json, bounded by the position table where there is one."""
    path = folder / "sentence_bert_config.json"
    module = _read_json(path) or {}
    limit = module.get("max_seq_length")
    if limit is None:
        limit = _tokenizer_limit(folder, positions)
    if not isinstance(limit, int) or limit <= 0:
        raise ModelError(f"{path}: max_seq_length is {limit!r}, expected a positive whole number")
    return min(limit, positions or limit), bool(module.get("do_lower_case"))


def _tokenizer_limit(folder: Path, positions: int | None) -> int | None:
    """`model_max_length` where it means something: transformers writes 1e30 for "not known"."""
    limit = (_read_json(folder / "tokenizer_config.json") or {}).get("model_max_length")
    return int(limit) if isinstance(limit, int | float) and 0 < limit < 1e9 else positions


def _read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """The model's prompts by name, and the text of the one that its authors made the default."""
    path = folder / "config_sentence_transformers.json"
    config = _read_json(path) or {}
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path}: prompts must map names to strings")
    if default is not None and default not in prompts:
        raise ModelError(f"{path}: default_prompt_name {default!r} is not one of the prompts {sorted(prompts)}")
    return prompts, None if default is None else prompts[default]


# In which order sentence-transformers' modules may follow one another; only Dense may come several times.
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")


def _read_modules(folder: Path, hidden_size: int) -> tuple[str, tuple[DenseConfig, ...]]:
    """(folder of the pooling, the layers after it)."""
    path, pooling, kinds = folder / "modules.json", "1_Pooling", ["Transformer"]
    dense: list[DenseConfig] = []
    for module in _read_json(path) or []:
        kind, name = module.get("type", "").rsplit(".", 1)[-1], module.get("path", "")
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
    return pooling, tuple(dense)


def _read_dense(folder: Path, name: str, width: int) -> DenseConfig:
    path = folder / name / "config.json"
    config = _read_json(path)
    if config is None:
        raise ModelError(f"{folder / 'modules.json'} names a Dense layer in {name}, which has no config.json")
    keys = Keys(path, config)
    keys.refuse("use_residual", (False, None), "only plain layers")
    for key in ("module_input_name", "module_output_name"):
        keys.refuse(key, ("sentence_embedding", None), "only layers of whole vectors, after pooling")
    # Known by name, never imported; sentence-transformers' own default is Tanh.
    activation = str(keys.get("activation_function", "torch.nn.modules.activation.Tanh"))
    package, _, kind = activation.rpartition(".")
    if kind not in get_args(DenseActivation) or not package.startswith("torch.nn."):
        raise ModelError(f"{path}: activation_function {activation} is not supported; supported are {get_args(DenseActivation)}")
    if keys.number("in_features") != width:
        raise ModelError(f"{path}: in_features is {keys.get('in_features')}, what comes before has {width} dimensions")
    return DenseConfig(name, width, keys.number("out_features"), bool(keys.get("bias", True)), cast(DenseActivation, kind))


def _read_pooling(folder: Path, name: str, hidden_size: int) -> Pooling:
    path = folder / name / "config.json"
    config = _read_json(path)
    if config is None:
        raise ModelError(
            f"{folder} does not say how to pool (no {name}/config.json): "
            f"choose one of {', '.join(get_args(Pooling))} with --pooling"
        )
    if config.get("include_prompt", True) is not True:
        raise ModelError(
            f"{path}: include_prompt = false is not supported: poolings here read a text with its prompt; "
            "where no text gets a prompt it makes no difference, and --pooling says that"
        )
    width = config.get("word_embedding_dimension", config.get("embedding_dimension", hidden_size))
    if width != hidden_size:
        raise ModelError(f"{path}: pools {width} dimensions, the model has {hidden_size}")
    return _pooling_mode(path, config)


def _pooling_mode(path: Path, config: dict[str, Any]) -> Pooling:
    """The one mode that is set: `pooling_mode` (sentence-transformers 5 on) or a `pooling_mode_*` flag."""
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
    modes = [mode] if isinstance(mode, str) else list(mode or [])
    modes = modes or [name for flag, name in flags.items() if config.get(flag)]
    if len(modes) != 1 or modes[0] not in named:
        raise ModelError(f"{path}: pooling {modes or 'nothing'} is not supported; supported is one of {list(named)}")
    return cast(Pooling, named[modes[0]])


def _read_json(path: Path) -> Any:
    """The file's content, or None where there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
