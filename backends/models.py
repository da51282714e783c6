"""Hugging Face models for the engines that run them: read from a folder, or made anew from a config and a seed."""

import dataclasses
import difflib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from asyncflow.backends.base import ModelSpec
from asyncflow.errors import ConfigError, MissingDependency

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

INSTALL = "pip install 'asyncflow-rl[torch]'"

# Keys that a config takes though they are no fields of it: transformers moves them into others.
_LEGACY = {"rope_theta", "rope_scaling", "torch_dtype", "num_labels"}


def new_model(spec: ModelSpec, dtype: "torch.dtype | None" = None) -> "PreTrainedModel":
    """Return the language model in evaluation mode (no dropout), on the CPU, in `spec.dtype` or the given one.

    A new model's weights depend on config and seed alone, and the global random state is left as it was. Raises
    ConfigError for a folder or config that is wrong, MissingDependency without torch and transformers.
    """
    return _new(spec, dtype, "AutoModelForCausalLM")


def new_body(spec: ModelSpec, dtype: "torch.dtype | None" = None) -> "PreTrainedModel":
    """Return the same model, with the same weights, but without its head: it gives hidden states."""
    return _new(spec, dtype, "AutoModel")


def _new(spec: ModelSpec, dtype: "torch.dtype | None", name: str) -> "PreTrainedModel":
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingDependency(error.name or "transformers", "a Hugging Face model", INSTALL) from error
    kind = dtype if dtype is not None else getattr(torch, spec.dtype)
    maker: Any = getattr(transformers, name)
    if spec.path is not None:
        model = _read(spec.path, kind, maker)
    else:
        config = model_config(spec)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(spec.seed)
            model = maker.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():  # not the buffers: rotary frequencies must stay float32
            parameter.data = parameter.data.to(kind)
    return cast("PreTrainedModel", model.eval())


def model_config(spec: ModelSpec) -> "PretrainedConfig":
    """Return the config of a new model; unknown keys and values are a ConfigError that names them."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    given: dict[str, Any] = dict(spec.config or {})
    problems = config_problems(given)
    if problems:
        raise ConfigError(problems)
    if spec.eos_token is not None:
        given.setdefault("eos_token_id", spec.eos_token)
    try:
        config: PretrainedConfig = AutoConfig.for_model(**given)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigError(f"model.config: {error}") from error
    return config


def config_problems(given: Mapping[str, object]) -> list[str]:
    """Return a line for each key of a config that its model type does not know; transformers would accept them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = given.get("model_type")
    if not isinstance(kind, str):
        return ["model.config.model_type: is needed, for example qwen2"]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = _nearest(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        return [f"model.config.model_type: {kind!r} is no causal language model of transformers{near}"]
    known = _known(CONFIG_MAPPING[kind])
    return [f"model.config.{key}: unknown to {kind}{_nearest(key, known)}" for key in given if key not in known]


def read_options(engine: str, options: Mapping[str, object], known: Mapping[str, object]) -> dict[str, Any]:
    """Return an engine's options with their defaults; an unknown one is a ConfigError with the nearest name."""
    problems = [
        f"options.{key}: unknown to the engine {engine}{_nearest(key, known)}" for key in options if key not in known
    ]
    if problems:
        raise ConfigError(problems)
    return {**known, **options}


def cache_keyword(model: "PreTrainedModel") -> str:
    """Return the name under which the model's forward takes a cache: it changed within transformers 5."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def default_device() -> str:
    """Return `cuda` where there is one, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _read(path: str, dtype: "torch.dtype", maker: Any) -> Any:
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"model.path: {path} is not a folder with a config.json in Hugging Face format")
    return maker.from_pretrained(path, dtype=dtype, local_files_only=True)


def _known(config: Any) -> set[str]:
    fields = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    arguments = set(inspect.signature(config.__init__).parameters) - {"self", "args", "kwargs"}
    return fields | arguments | set(config.attribute_map) | _LEGACY | {"model_type"}


def _nearest(name: str, known: Mapping[str, object] | set[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(known))}" if len(known) < 20 else ""
