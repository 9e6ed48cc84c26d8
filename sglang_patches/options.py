"""The options of the command line, checked and frozen: one value that travels with SGLang's arguments to every rank."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from redknot.artifact.store import ArtifactStore
from redknot.errors import ConfigError, RedKnotError
from redknot.model.geometry import Geometry, load_geometry
from redknot.model.location import find_checkpoint
from redknot.serving.naming import named_profiles

ARCHITECTURE = "RedKnotV4ForCausalLM"

Name = Annotated[str, Field(min_length=1)]


class ServerConfig(BaseModel):
    """The file of ``--redknot-config``: what is not an option of its own. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    namespace: Name = "default"  # of a request without an API key of its own
    shared_namespace: Name | None = None  # whose documents every other namespace sees too
    api_keys: dict[Name, Name] = Field(default_factory=dict)  # API key -> namespace
    read_timeout_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)  # longest wait of a request for artifacts
    profiles: tuple[Name, ...] = ()  # files of profiles that requests may name, beside the shipped ones


@dataclass(frozen=True)
class Options:
    """What a rank needs to know."""

    model: Path
    store: Path | None
    profile: str
    config: ServerConfig
    geometry: Geometry

    @classmethod
    def read(cls, model: str, store: str | None, profile: str, config: str | None) -> Self:
        """Check everything that can be checked before a model is loaded; ConfigError, StoreError and the like."""
        path = model_path(model)
        geometry, checked = load_geometry(path), read_config(config)
        named_profiles(profile, checked.profiles)
        if store is None:
            raise ConfigError(
                "--enable-redknot needs --redknot-store DIR; build one with python -m redknot.build_artifacts"
            )
        with ArtifactStore(store):
            pass
        return cls(path, Path(store).absolute(), profile, checked, geometry)


def model_path(given: str) -> Path:
    """The folder of a model; ``nano`` is the one that comes with RedKnot, unless there is a folder of that name."""
    path = find_checkpoint(given)
    if path is None:
        raise ConfigError(f"--model-path {given}: no such folder; nothing is downloaded with --enable-redknot")
    return path


def read_config(path: str | None) -> ServerConfig:
    """The file of ``--redknot-config``, YAML or JSON; ConfigError names what is wrong in it."""
    if path is None:
        return ServerConfig()
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--redknot-config {path}: {getattr(error, 'strerror', None) or 'not text'}") from None
    except (ValueError, yaml.YAMLError) as error:  # ValueError: a date that there is not
        raise ConfigError(f"--redknot-config {path}: {' '.join(str(error).split())}") from None
    content = {} if content is None else content
    if not isinstance(content, Mapping):
        raise ConfigError(f"--redknot-config {path}: must be an object of options")
    try:
        return ServerConfig.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"--redknot-config {path}: {where}: {first['msg']}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options, in a group of their own."""
    group = parser.add_argument_group("RedKnot")
    group.add_argument("--enable-redknot", action="store_true", help="Serve DeepSeek-V4 with reuse of known documents.")
    group.add_argument("--redknot-store", metavar="DIR", help="Artifact store to reuse documents from.")
    group.add_argument(
        "--redknot-profile", metavar="NAME", default="rowsparse", help="Reuse profile: a shipped one, or a JSON file."
    )
    group.add_argument("--redknot-config", metavar="FILE", help="Namespaces, API keys and time limits, YAML or JSON.")


# Features of SGLang that would need what our model does not do, or that go past our hooks, by field: what they mean.
_REFUSED = {
    "smg_grpc_mode": "a gRPC server (it asks for no API key)",
    "grpc_mode": "a gRPC server (it asks for no API key)",
    "grpc_port": "a gRPC server (it asks for no API key)",
    "use_ray": "Ray",
    "is_embedding": "an embedding model",
    "speculative_algorithm": "speculative decoding",
    "enable_lora": "LoRA",
    "lora_paths": "LoRA",
    "enable_dp_attention": "data-parallel attention",
    "enable_hierarchical_cache": "the hierarchical cache",
    "quantization": "quantization (the checkpoint's own is read)",
}
# Fields that follow from the model; a user may say the same, and nothing else.
_DTYPES = ("auto", "float", "float32")
_BACKEND = "torch_native"
_ONE = {"pp_size": "pipeline parallelism", "dp_size": "data parallelism", "tokenizer_worker_num": "tokenizer workers"}


def refuse_unsupported(args: Any) -> None:
    """ConfigError for a feature that cannot be served."""
    for name, meaning in _REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(f"--{name.replace('_', '-')}: {meaning} cannot be used with --enable-redknot")
    for name, meaning in _ONE.items():
        if (getattr(args, name, 1) or 1) != 1:
            raise ConfigError(f"--{name.replace('_', '-')}: {meaning} beyond 1 cannot be used with --enable-redknot")
    if getattr(args, "disaggregation_mode", "null") not in (None, "null"):
        raise ConfigError("--disaggregation-mode cannot be used with --enable-redknot")
    refuse_device(args.device)


def refuse_device(device: str | None) -> None:
    """ConfigError for a device that cannot be served on."""
    if device == "cuda":
        from sglang_patches.cuda import start

        start.refuse()
    elif device != "cpu":
        raise ConfigError("--enable-redknot serves with --device cpu, or with --device cuda, unverified on hardware")


_REQUESTS = 16
_POOL_CONTEXTS = 4  # requests of the longest context that the pages have room for
_LEAST_POOL_TOKENS = 8192
_CHUNK_TOKENS = 2048
_V4_BOS = "<｜begin▁of▁sentence｜>"


def defaults(options: Options, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SGLang's arguments for this model; ``given`` are the user's, None where there is none."""
    page = options.geometry.block_length
    context = given.get("context_length") or options.geometry.max_positions
    if not 0 < context <= options.geometry.max_positions:
        raise ConfigError(f"--context-length {context}: the model has {options.geometry.max_positions} positions")
    refuse_other("--page-size", given.get("page_size"), (page,))
    refuse_other("--dtype", given.get("dtype"), _DTYPES)
    refuse_other("--attention-backend", given.get("attention_backend"), (_BACKEND,))
    pool = given.get("max_total_tokens") or max(_POOL_CONTEXTS * context, _LEAST_POOL_TOKENS)
    overrides = _overrides(given.get("json_model_override_args"))
    return {
        "model_path": str(options.model),
        "tokenizer_path": given.get("tokenizer_path") or str(options.model),
        "served_model_name": given.get("served_model_name") or options.model.name,
        "json_model_override_args": json.dumps(overrides | {"architectures": [ARCHITECTURE]}),
        "dtype": "float32",
        "page_size": page,
        "context_length": context,
        "max_total_tokens": -(-pool // page) * page,
        "max_running_requests": given.get("max_running_requests") or _REQUESTS,
        "chunked_prefill_size": whole_pages(given.get("chunked_prefill_size"), page),
        "attention_backend": _BACKEND,
        "sleep_on_idle": True,  # an idle scheduler would keep a core busy, and ranks share the cores with builds
        # SGLang's warm-up asks this server without a key of ours, and ends it when it is sent away.
        "skip_server_warmup": bool(given.get("skip_server_warmup") or options.config.api_keys),
        "tool_call_parser": given.get("tool_call_parser") or _chat_encoding(options.model),
    }


def refuse_other(option: str, given: Any, served: Sequence[Any]) -> None:
    """ConfigError for a value that a user gave and the model does not have; the last one served is named."""
    if given is not None and given not in served:
        raise ConfigError(f"{option} {given}: this model is served with {served[-1]}; leave the option out")


def _overrides(given: str | None) -> dict[str, Any]:
    try:
        found = json.loads(given or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError("--json-model-override-args must be an object in JSON")
    return found


def _chat_encoding(model: Path) -> str | None:
    """V4's own chat encoding, which SGLang derives from the name of the architecture, or from this option.

    It takes V4's role markers; a tokenizer without them (nano's) has a chat template, or none.
    """
    try:
        added = json.loads((model / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens", [])
    except (OSError, ValueError):
        return None
    return "deepseekv4" if any(token.get("content") == _V4_BOS for token in added) else None


def whole_pages(chunk: int | None, page: int) -> int:
    """A chunk of whole pages; SGLang refuses any other."""
    if chunk is not None and chunk <= 0:
        return chunk
    return max((chunk or _CHUNK_TOKENS) // page, 1) * page


def one_line(error: RedKnotError) -> str:
    """What a user reads instead of a traceback."""
    return f"redknot: {' '.join(str(error).split())}"
