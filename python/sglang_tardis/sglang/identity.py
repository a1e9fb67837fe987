# SPDX-License-Identifier: Apache-2.0
"""The namespace of one server: what must agree before stored KV may be used again, as SGLang has it in effect."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_tardis.bridge.framing import framed_digest
from sglang_tardis.bridge.namespace import NamespaceIdentity, canonical_kv_dtype
from sglang_tardis.bridge.pieces import PieceLayout
from sglang_tardis.log import logger
from sglang_tardis.sglang.host_pool import HostPoolShape
from sglang_tardis.sglang.ranks import common_name
from sglang_tardis.sglang.server_settings import ServerSettings
from sglang_tardis.weights import (
    WeightsError,
    changed_after,
    model_config_digest,
    tensor_names,
    weights_fingerprint,
)

__all__ = ["IdentityError", "build_identity", "identify_weights", "local_model_path", "replaces_all_weights"]

# Server arguments that change the KV values of equal tokens and show neither in the checkpoint's files nor in the host
# pool. Only values other than the default enter, so that a release that adds one does not empty the store.
_RELEVANT_ARGUMENTS = (
    "dtype",
    "quantization",
    "model_loader_extra_config",
    "modelopt_quant",
    "modelopt_checkpoint_restore_path",
    "quantize_and_serve",
    "rl_quant_profile",
    "torchao_config",
    "decrypted_config_file",
    "qsa_indexer_dtype",
    "model_impl",
    "model_config_parser",
    "forward_hooks",
    "rl_on_policy_target",
    "enable_precise_embedding_interpolation",
    "enable_w4a4_mxfp4_megamoe",
)
# Which tokens of a page a context-parallel rank holds. They matter, and enter, only where there are several.
_CONTEXT_PARALLEL_ARGUMENTS = ("enable_prefill_cp", "cp_strategy", "prefill_cp_mode", "dsa_prefill_cp_mode")
# Experts that KTransformers takes from elsewhere and computes in other precisions.
_KT_ARGUMENTS = ("kt_method", "kt_num_gpu_experts", "kt_max_deferred_experts_per_token")
# Weights that do not come from files of the model's folder.
_FORMATS_WITHOUT_FILES = ("remote", "remote_instance", "modelexpress", "rdma", "ipc_cache", "private")


class IdentityError(RuntimeError):
    """What is stored cannot be told apart from what another server would store."""


def build_identity(
    storage_config: Any,
    pool: Any,
    shape: HostPoolShape,
    layout: PieceLayout,
    *,
    weights_revision: str | None,
    device_pool: Any = None,
    settings: ServerSettings | None = None,
    loaded_at: float | None = None,
) -> NamespaceIdentity:
    """The identity of the pages that this rank stores.

    Ranks that hold different bytes get different identities: shards of MHA, pipeline stages, context-parallel ranks.
    Those of equal bytes share one: MLA under tensor parallelism, and data-parallel replicas, whose rank is left out.

    Args:
        storage_config: SGLang's HiCacheStorageConfig (ranks, sizes).
        pool: the host pool of the target model's KV.
        shape: its geometry (:func:`sglang_tardis.sglang.host_pool.inspect_pool`).
        layout: how its pages are stored.
        weights_revision: the setting, or None to fingerprint the checkpoint.
        device_pool: the device pool it mirrors; it knows the real dtype, which the host pool may show as uint8.
        settings: SGLang's settings; the process's by default.
        loaded_at: when the model was loaded (Unix seconds), if known; see :func:`identify_weights`.

    Raises:
        IdentityError: something that matters cannot be determined; the message names the setting that helps.
    """
    settings = settings or ServerSettings()
    if bool(storage_config.is_mla_model) != shape.is_mla:
        raise IdentityError(
            f"SGLang says that the ranks' KV is {'equal (MLA)' if storage_config.is_mla_model else 'different (MHA)'}, "
            f"but the host pool {type(pool).__name__} holds the other kind: which ranks may share pages is not clear."
        )
    config_digest = _config_digest(settings)
    extra = _extra_facts(settings, shape, weights_revision)
    cp_size = getattr(storage_config, "attn_cp_size", 1) or 1
    if cp_size > 1:
        extra.update({name: str(settings.get(name)) for name in _CONTEXT_PARALLEL_ARGUMENTS})
    return NamespaceIdentity(
        model_name=_model_name(storage_config, pool, settings),
        model_config=config_digest,
        weights=identify_weights(settings, weights_revision, loaded_at=loaded_at),
        kv_dtype=_kv_dtype(pool, device_pool, settings),
        layers=shape.layers,
        start_layer=shape.start_layer,
        end_layer=shape.start_layer + shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.v_head_dim,
        page_size=shape.page_tokens,
        layout=layout.tag,
        is_mla=shape.is_mla,
        is_eagle="EAGLE" in str(settings.get("speculative_algorithm", "") or "").upper(),
        tp_rank=storage_config.tp_rank,
        tp_size=storage_config.tp_size,
        pp_rank=storage_config.pp_rank,
        pp_size=storage_config.pp_size,
        cp_rank=getattr(storage_config, "attn_cp_rank", 0) or 0,
        cp_size=cp_size,
        dcp_rank=getattr(storage_config, "dcp_rank", 0),
        dcp_size=getattr(storage_config, "dcp_size", 1),
        extra=extra,
    )


def identify_weights(
    settings: ServerSettings,
    weights_revision: str | None,
    model_path: str | None = None,
    load_format: str | None = None,
    *,
    hub_revision: str | None = None,
    loaded_at: float | None = None,
) -> str:
    """What names the weights: the setting, or a fingerprint of the checkpoint's files.

    Args:
        settings: SGLang's settings.
        weights_revision: the setting, or None.
        model_path: folder or hub name of the weights; the server's own by default.
        load_format: how they are loaded; the server's own by default.
        hub_revision: revision of a hub name; the server's own by default.
        loaded_at: when they were loaded (Unix seconds); files that changed later tell nothing about them.
    """
    if weights_revision is not None:
        return f"revision:{weights_revision}"
    path = model_path or settings.get("model_path")
    load_format = str(load_format or settings.get("load_format", "auto"))
    if load_format in _FORMATS_WITHOUT_FILES:
        raise _unidentified(f"--load-format {load_format} takes the weights from elsewhere than {path}")
    if str(settings.get("weight_cache_mode", "off")) == "client":
        raise _unidentified("--weight-cache-mode client takes them from a process that loaded them earlier")
    folder = local_model_path(path, settings, hub_revision)
    dummy = load_format == "dummy"
    try:
        given = Path(path).expanduser()
        changed = None if loaded_at is None else changed_after(given if given.exists() else folder, loaded_at)
        if changed is not None:
            raise _unidentified(f"{changed} changed after this server had loaded the model")
        fingerprint = weights_fingerprint(folder, dummy=dummy)
    except WeightsError as error:
        raise _unidentified(str(error)) from error
    if not dummy and fingerprint.startswith("dummy"):
        raise _unidentified(f"{folder} holds no weights that tardis knows, but --load-format is {load_format}")
    return fingerprint


def replaces_all_weights(settings: ServerSettings, model_path: str) -> bool:
    """Whether a checkpoint holds every tensor of the one that the server was started with, as far as files tell."""
    try:
        started = tensor_names(local_model_path(settings.get("model_path"), settings))
        loaded = tensor_names(local_model_path(model_path, settings))
    except (IdentityError, WeightsError):
        return False
    return started is not None and loaded is not None and started <= loaded


def local_model_path(path: str | None, settings: ServerSettings, hub_revision: str | None = None) -> Path:
    """The folder (or GGUF file) on this machine that holds a model given by path or by its name on the hub.

    `hub_revision` is that of a hub name; the server's own by default.
    """
    if not path:
        raise _unidentified("SGLang has not published a model path in this process")
    local = Path(path).expanduser()
    if local.exists():
        return local.resolve()
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                path,
                revision=hub_revision or settings.get("revision"),
                cache_dir=settings.get("download_dir"),
                local_files_only=True,
            )
        )
    except Exception as error:
        raise _unidentified(f"{path!r} is neither a folder nor a model in the local hub cache ({error})") from error


def _unidentified(why: str) -> IdentityError:
    return IdentityError(
        f"The weights cannot be identified: {why}. Set weights_revision in --hicache-storage-backend-extra-config to a "
        "name that changes whenever the weights change."
    )


def _model_name(storage_config: Any, pool: Any, settings: ServerSettings) -> str:
    """The served name; where it is only the model's path, without the folders, so that a model may be moved."""
    name = str(settings.get("served_model_name") or storage_config.model_name or "")
    if name == str(settings.get("model_path")):
        name = name.rstrip("/").rsplit("/", 1)[-1]
    tag = getattr(pool, "storage_format_tag", None)
    return f"{name}-{tag}" if tag and not name.endswith(f"-{tag}") else name


def _config_digest(settings: ServerSettings) -> str:
    """Digest of the model's configuration after the command line's overrides."""
    config: dict[str, Any] = {}
    try:
        folder = local_model_path(settings.get("model_path"), settings)
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (IdentityError, OSError, ValueError):
        # No such file (GGUF), or no local folder: then the weights are named by hand, and so is what they need.
        config = {"model_path": str(settings.get("model_path"))}
    overrides = settings.get("json_model_override_args", "{}")
    try:
        overrides = json.loads(overrides) if isinstance(overrides, str) else overrides
    except ValueError:
        overrides = {"unparsed": overrides}
    if isinstance(overrides, Mapping) and overrides:
        config = {**config, "sglang_tardis_overrides": overrides}
    return model_config_digest(config)


def _kv_dtype(pool: Any, device_pool: Any, settings: ServerSettings) -> str:
    candidates = [getattr(device_pool, "dtype", None), pool.dtype, settings.get("kv_cache_dtype", "auto")]
    for candidate in candidates:
        try:
            return canonical_kv_dtype(str(candidate))
        except ValueError:
            continue
    raise IdentityError(
        f"The KV cache's element type cannot be determined (device pool {candidates[0]}, host pool {candidates[1]}, "
        f"--kv-cache-dtype {candidates[2]}). Name it with --kv-cache-dtype."
    )


def _extra_facts(settings: ServerSettings, shape: HostPoolShape, weights_revision: str | None) -> dict[str, str]:
    facts: dict[str, str] = {}
    for name in _RELEVANT_ARGUMENTS:
        value = settings.get(name)
        if value not in (None, "", "auto", False, {}, "{}"):
            facts[name] = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    scales = settings.get("quantization_param_path")
    if scales:
        try:
            facts["kv_scales"] = hashlib.sha256(Path(scales).expanduser().read_bytes()).hexdigest()
        except OSError as error:
            raise IdentityError(f"--quantization-param-path {scales} cannot be read: {error}") from error
    if str(settings.get("load_format", "auto")) == "dummy":
        # The values come from the device's own generator.
        facts["dummy_weights_device"] = str(settings.get("device", "") or "").split(":")[0]
    if shape.draft_layers:
        draft = settings.get("speculative_draft_model_path")
        revision = settings.get("speculative_draft_model_revision") or "main"
        facts["draft_layers"] = str(shape.draft_layers)
        facts["speculative_algorithm"] = str(settings.get("speculative_algorithm", ""))
        facts["draft_weights"] = (
            _other_weights(settings, weights_revision, draft, hub_revision=revision) if draft else "with the model"
        )
    experts = settings.get("kt_weight_path")
    if experts:
        facts["kt_weights"] = _other_weights(settings, weights_revision, experts, load_format="auto")
        facts.update({name: str(settings.get(name)) for name in _KT_ARGUMENTS})
    adapters = settings.get("lora_paths")
    if adapters:
        facts["lora"] = _adapters_digest(adapters, settings)
    return facts


def _other_weights(settings: ServerSettings, weights_revision: str | None, path: str, **kwargs: Any) -> str:
    """Weights beside the model's; the setting stands for those that cannot be identified, too."""
    try:
        return identify_weights(settings, None, path, **kwargs)
    except IdentityError:
        if weights_revision is None:
            raise
        return f"path:{path}"


def _adapters_digest(adapters: Any, settings: ServerSettings) -> str:
    """Digest of the adapters given at start.

    SGLang derives an adapter's key from its name and path, so another adapter in the same place would find the pages of
    the first. (Adapters loaded at run time get a random key and need nothing.)
    """
    entries = []
    items = adapters.items() if isinstance(adapters, Mapping) else [(None, adapter) for adapter in adapters]
    for name, adapter in items:
        if isinstance(adapter, str):
            name, path = adapter.split("=", 1) if name is None and "=" in adapter else (name or adapter, adapter)
        elif isinstance(adapter, Mapping):
            name, path = name or adapter.get("lora_name"), adapter.get("lora_path")
        else:
            name, path = getattr(adapter, "lora_name", name), getattr(adapter, "lora_path", None)
        try:
            folder = local_model_path(path, settings)
            fingerprint = weights_fingerprint(folder)
            config = folder / "adapter_config.json"
            config_digest = hashlib.sha256(config.read_bytes()).hexdigest() if config.exists() else ""
            entries.append([str(name), fingerprint, config_digest])
        except (IdentityError, WeightsError, OSError) as error:
            logger.warning(
                "LoRA adapter %s cannot be identified (%s): what this server stores will not be found after a restart.",
                name,
                error,
            )
            entries.append([str(name), common_name(f"adapter/{name}"), ""])
    return framed_digest("sglang-tardis/lora/v1", sorted(entries)).hex()
