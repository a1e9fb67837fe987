# SPDX-License-Identifier: Apache-2.0
"""``--attention-backend tardis``: what it takes of SGLang's settings, and what it refuses by name.

Nothing of SGLang is imported before somebody asks for this backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_tardis.config import TardisConfig, load_config
from sglang_tardis.log import logger
from sglang_tardis.sglang.server_settings import ServerSettings

__all__ = ["NAME", "declare_attention_mode", "is_wanted", "prepare_worker", "refuse_server", "settings_of"]

NAME = "tardis"
PAGE_SIZES = (16, 32, 64, 128)
"""Of the decode kernel; on CPU tensors any will do."""
KV_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")

_FLAG = "--attention-backend tardis"
_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
NEEDED_MODULE = "sglang.srt.mem_cache.kv_index_translator"
"""Came when places where KV is written became physical in every pool, which the backend relies on."""
# Flags, and what they must be. They put KV elsewhere, or use it in ways that this backend does not.
_REFUSED = (
    ("speculative_algorithm", (None, "", "NONE"), "it has no kernels for drafts and their verification"),
    ("disaggregation_mode", (None, "null"), "transfers between servers expect KV in HBM"),
    ("enable_memory_saver", (None, False), "the memory saver gives back HBM, and there is none"),
    ("enable_unified_memory", (None, False), "its pools are parts of one buffer in HBM"),
    ("enable_hisparse", (None, False), "it keeps a host pool of its own"),
    ("enable_kv_cache_sharding", (None, False), "KV would be on several ranks"),
    ("enable_pdmux", (None, False), "it runs prefill and decode beside each other"),
    ("enable_two_batch_overlap", (None, False), "it has one set of metadata"),
    ("enable_nvidia_megakernel", (None, False), "megakernels bring their own attention"),
    ("prefill_only_disable_kv_cache", (None, False), "there is no KV to read"),
    ("dllm_algorithm", (None, ""), "it has no kernels for diffusion models"),
    ("dcp_size", (None, 1), "KV would be on several ranks"),
    ("attn_cp_size", (None, 1), "KV would be on several ranks"),
)


def is_wanted(names: Any = None) -> bool:
    """Whether this process serves with the backend, for prefill, decode or both.

    Args:
        names: of the backends; None: those in effect.
    """
    if names is None:
        from sglang.srt.runtime_context import attention_backends

        names = attention_backends()
    return NAME in names


def declare_attention_mode(server_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before SGLang resolves its arguments: prefill is not captured in graphs, since its lengths are the host's.

    What flags alone decide is refused here, since the schedulers find it only when they have loaded the weights.

    Raises:
        ValueError: this SGLang lacks what the backend needs, or the flags contradict it.
        NotImplementedError: a flag for what the backend does not do.
        ConfigError: a setting of tardis is unknown or wrong.
    """
    from sglang_tardis.sglang.direct_mode import resolving_settings
    from sglang_tardis.sglang.seams import module_exists, sglang_version

    view = resolving_settings(server_args)
    if not is_wanted([getattr(view, name, None) for name in _BACKENDS]):
        return
    if not module_exists(NEEDED_MODULE):
        raise ValueError(
            f"{_FLAG} needs SGLang's {NEEDED_MODULE}, which came with later releases; this is {sglang_version()}. Use "
            "0.5.23, or another attention backend."
        )
    for flag, wanted in (
        ("--cuda-graph-backend-prefill", getattr(view, "cuda_graph_backend_prefill", None)),
        ("--cuda-graph-config, prefill:", _prefill_graphs(getattr(view, "cuda_graph_config", None))),
    ):
        if wanted not in (None, "disabled"):
            raise ValueError(f"{_FLAG}: expected prefill without CUDA graphs, found {flag} {wanted}; leave it out")
    _refuse_flags(lambda name: getattr(view, name, None))
    if _is_on_gpu(view.device):
        _refuse_page_size(view.page_size or 1)  # SGLang's default
    settings_of(server_args)  # wrong ones are told here, not by a rank
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(server_args, "tardis_attention", disable_prefill_cuda_graph=True)


def prepare_worker(*_args: Any, **_kwargs: Any) -> None:
    """Before a scheduler makes its model runner, which imports what is to be hooked."""
    if is_wanted():
        from sglang_tardis.sglang import seams

        seams.install_attention()
        logger.info(
            "tardis: attention backend: KV of running requests in host memory; prefill is not captured in graphs"
        )


def settings_of(server_args: Any) -> TardisConfig:
    """Settings of tardis: those of ``--hicache-storage-backend-extra-config`` if it is tardis's, and TARDIS_CONFIG."""
    get = ServerSettings(server_args).get if server_args is not None else ServerSettings().get
    if get("hicache_storage_backend") == NAME:
        return load_config(get("hicache_storage_backend_extra_config"))
    linker = get("unified_cache_external_linker_config")
    if isinstance(linker, dict) and str(linker.get("linker_module_path", "")).startswith("sglang_tardis"):
        return load_config(linker.get("linker_extra_config"))
    return load_config(None)


def _refuse(expected: str, found: str, advice: str = "") -> None:
    raise NotImplementedError(
        f"{_FLAG}: expected {expected}, found {found}{'; ' + advice if advice else ''}; or use another backend"
    )


def _refuse_flags(get: Callable[[str], Any]) -> None:
    for name, allowed, reason in _REFUSED:
        value = get(name)
        if value not in allowed:
            _refuse(f"no --{name.replace('_', '-')}", str(value), reason)


def _refuse_page_size(tokens: int) -> None:
    if tokens not in PAGE_SIZES:
        _refuse(f"pages of {', '.join(map(str, PAGE_SIZES))} tokens", str(tokens), "set --page-size 64")


def _is_on_gpu(device: str | None) -> bool:
    """Where the server will be; None: where SGLang will put it."""
    if device is None:
        import torch

        return torch.cuda.is_available()
    return device.startswith("cuda")


def _prefill_graphs(config: Any) -> str | None:
    """The backend of prefill's graphs in a --cuda-graph-config, as given or as resolved; None: it does not say."""
    phase = config.get("prefill") if isinstance(config, Mapping) else getattr(config, "prefill", None)
    return phase.get("backend") if isinstance(phase, Mapping) else getattr(phase, "backend", None)


def refuse_server(configurator: Any, settings: ServerSettings) -> None:
    """Raise NotImplementedError for models and modes that would be served wrongly, by name, before memory is taken.

    Args:
        configurator: SGLang's KVCacheConfigurator.
        settings: SGLang's.
    """
    _refuse_flags(settings.get)
    graphs = _prefill_graphs(settings.get("cuda_graph_config"))
    if graphs not in (None, "disabled"):
        _refuse("prefill without CUDA graphs", str(graphs), "its attention reads lengths of the host")
    model, on_gpu = configurator.model_config, str(configurator.device) != "cpu"
    architectures = getattr(getattr(model, "hf_config", None), "architectures", None)
    if configurator.use_mla_backend:
        _refuse("a model with K and V of each head (MHA, GQA)", f"MLA ({architectures})")
    if getattr(model, "is_encoder_decoder", False):
        _refuse("a decoder", f"an encoder and cross attention ({architectures})")
    if configurator.mambaish_config is not None:
        _refuse("attention in every layer", f"layers with states ({architectures})")
    if configurator.is_hybrid_swa:
        _refuse("one KV pool", "a pool for sliding-window layers besides", "add --disable-hybrid-swa-memory")
    if configurator.is_draft_worker:
        _refuse("no draft model", "one")
    if configurator.post_capture_kv_active:
        _refuse("a KV pool that is allocated at once", "one that is sized after graphs were captured")
    if getattr(configurator, "kv_shard_rank", None) is not None:
        _refuse("KV of a layer on one rank", "--enable-kv-cache-sharding")
    if settings.get("enable_hierarchical_cache") and settings.get("hicache_io_backend") == "direct" and on_gpu:
        # Copies between two host memories: single ones keep their place in a stream, batches were not looked at.
        _refuse("copies of pages by kernels", "--hicache-io-backend direct", "use --hicache-io-backend kernel")
    dtype = str(configurator.kv_cache_dtype).removeprefix("torch.")
    if dtype not in KV_DTYPES:
        _refuse(f"KV as {', '.join(KV_DTYPES)}", dtype, "set --kv-cache-dtype")
    if on_gpu:
        _refuse_page_size(configurator.page_size)
