# SPDX-License-Identifier: Apache-2.0
"""Every place where tardis meets SGLang: how it is found, hooked, and verified.

SGLang has official hooks (``HookRegistry``), but a hook that cannot be applied is only logged there. So each one is
looked for again when a backend named tardis is created: a seam that is missing or was not taken stops the start of that
server with an error that names the seam and SGLang's version. Seams are found by what a release contains, never by its
version number; 0.5.16 and 0.5.23 keep several of them in different modules.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import sys
import typing
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from sglang_tardis.log import logger

BACKEND = "tardis"
BACKEND_MODULE = "sglang_tardis.sglang.storage"
BACKEND_CLASS = "TardisStorage"

# Below this page size the list of all earlier keys, which SGLang builds for each write on the scheduler thread, costs
# more than the parent link that is read from it is worth.
_MIN_PAGE_SIZE_FOR_PREFIX_KEYS = 16

_ARGS_MODULE = "sglang.srt.server_args"
_CONTROLLER_MODULE = "sglang.srt.managers.cache_controller"
_HYBRID_MODULE = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
_FACTORY_MODULE = "sglang.srt.mem_cache.storage.backend_factory"
_UPDATER_MODULE = "sglang.srt.managers.scheduler_components.weight_updater"
_BATCH_MODULE = "sglang.srt.managers.schedule_batch"
_SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
_STREAMER_MODULE = "sglang.srt.managers.scheduler_components.output_streamer"
_TREE_MODULE = "sglang.srt.mem_cache.unified_radix_cache"
_LINKER_MODULE = "sglang.srt.mem_cache.unified_cache.unified_cache_linker"
_CONFIGURATOR_MODULE = "sglang.srt.mem_cache.kv_cache_configurator"
_POOL_MODULE = "sglang.srt.mem_cache.memory_pool"
_ATTENTION_REGISTRY_MODULE = "sglang.srt.layers.attention.attention_registry"
# Where each release keeps the list of attention backends' names, and extends it.
_ATTENTION_CHOICES = ("sglang.srt.arg_groups.choices", "sglang.srt.server_args")
_RUNTIME_CONFIG_TARGETS = (
    ("sglang.srt.mem_cache.unified_cache.storage_attachment", "StorageAttachment.apply_runtime_config"),
    ("sglang.srt.mem_cache.unified_radix_cache", "UnifiedRadixCache._apply_storage_runtime_config"),
    ("sglang.srt.mem_cache.hiradix_cache", "HiRadixCache._apply_storage_runtime_config"),
)
_WEIGHT_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",
    "release_memory_occupation",
)

#: The controller whose attach_storage_backend is running in this context: the backend's constructor is given the host
#: pool only, and needs the device pool to learn the real dtype.
attaching_controller: ContextVar[Any] = ContextVar("tardis_attaching_controller", default=None)


class Seam(NamedTuple):
    """One place where tardis meets SGLang.

    Attributes:
        name: short name, used in messages.
        ok: whether it is there and taken.
        detail: what was found, or what is missing.
    """

    name: str
    ok: bool
    detail: str


class SeamError(RuntimeError):
    """Something that tardis needs is missing in this SGLang, or a hook was not applied."""


class _Hook(NamedTuple):
    seam: str
    module: str
    path: str  # attribute path inside the module
    kind: str  # "BEFORE" | "AFTER" | "AROUND"
    function: Callable[..., Any]

    @property
    def target(self) -> str:
        return f"{self.module}.{self.path}"


_problems: dict[str, str] = {}
_hooks: list[_Hook] = []
_installed = False
_direct = False  # this process has a linker of the direct door
_attention = False  # this process serves with the attention backend


def sglang_version() -> str:
    """Version of the SGLang in this environment, for messages only."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def module_exists(name: str) -> bool:
    """Whether a module can be imported; imports no more than the packages above it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


# ---- installing ---------------------------------------------------------------------------------------------------


def install() -> None:
    """Register everything. Called once per process by SGLang's plugin loader, which then applies the hooks."""
    global _installed
    if _installed:
        return
    _installed = True
    steps = (("cli choice", _add_cli_choice), ("registry", _register_backend), ("attention", _add_attention_choice))
    for name, step in steps:
        try:
            step()
            _problems.pop(name, None)
        except Exception as error:
            _problems[name] = f"{type(error).__name__}: {error}"
            logger.debug("tardis: seam %r: %s", name, _problems[name])
    _register_hooks()


def _add_cli_choice() -> None:
    _, arg = _cli_field(write_back=True)
    if BACKEND not in arg.choices:
        arg.choices.append(BACKEND)


def _cli_field(write_back: bool = False):
    """The resolved annotation of ServerArgs.hicache_storage_backend and its argument description."""
    from sglang.srt.server_args import ServerArgs

    field = "hicache_storage_backend"
    annotation = ServerArgs.__annotations__[field]
    if isinstance(annotation, str):
        # Unresolved annotations are evaluated anew by every reader; only a resolved one keeps an added choice.
        annotation = eval(annotation, vars(sys.modules[ServerArgs.__module__]))
        if write_back:
            ServerArgs.__annotations__[field] = annotation
    for item in typing.get_args(annotation)[1:]:
        if isinstance(getattr(item, "choices", None), list):
            return annotation, item
    raise SeamError("ServerArgs.hicache_storage_backend has no list of choices")


def _register_backend() -> None:
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    if BACKEND not in StorageBackendFactory._registry:
        StorageBackendFactory.register_backend(BACKEND, BACKEND_MODULE, BACKEND_CLASS)


def _add_attention_choice() -> None:
    for name in _ATTENTION_CHOICES:
        if not module_exists(name):
            continue
        module = importlib.import_module(name)
        if hasattr(module, "add_attention_backend_choices"):
            if BACKEND not in module.ATTENTION_BACKEND_CHOICES:
                module.add_attention_backend_choices([BACKEND])
            return
    raise SeamError(f"no list of attention backends in {' or '.join(_ATTENTION_CHOICES)}")


def _create_attention(runner):
    from sglang_tardis.sglang.attention import create

    return create(runner)


def _wanted_hooks() -> list[_Hook]:
    from sglang_tardis.sglang import attention_mode, direct_mode, extra_keys, weight_updates

    hooks = [
        _Hook("factory", _FACTORY_MODULE, "StorageBackendFactory._create_builtin_backend", "AROUND", _create_backend),
        _Hook("zero-copy", _CONTROLLER_MODULE, "HiCacheController.attach_storage_backend", "AROUND", _attach),
        _Hook("attach", _HYBRID_MODULE, "HybridCacheController.attach_storage_backend", "AROUND", _attach_or_undo),
        # Only releases that keep draft KV beside the tree's pools have this one.
        _Hook("draft", _CONTROLLER_MODULE, "HiCacheController._maybe_register_draft_with_storage", "BEFORE", _no_draft),
    ]
    hooks.append(
        _Hook("weight updates", _CONTROLLER_MODULE, "HiCacheController.__init__", "AROUND", weight_updates.note_model)
    )
    for module, path in _RUNTIME_CONFIG_TARGETS:
        hooks.append(_Hook("prefix keys", module, path, "BEFORE", _pass_prefix_keys))
    for method in _WEIGHT_UPDATES:
        path = f"SchedulerWeightUpdaterManager.{method}"
        hooks.append(_Hook("weight updates", _UPDATER_MODULE, path, "AROUND", weight_updates.around(method)))
    resolve = "resolve_once" if _resolves_late() else "_handle_hicache"
    hooks.append(_Hook("direct mode", _ARGS_MODULE, f"ServerArgs.{resolve}", "BEFORE", direct_mode.declare_direct_mode))
    mode = attention_mode.declare_attention_mode
    hooks.append(_Hook("attention mode", _ARGS_MODULE, f"ServerArgs.{resolve}", "BEFORE", mode))
    if module_exists(attention_mode.NEEDED_MODULE):
        worker = attention_mode.prepare_worker
        hooks.append(_Hook("attention mode", _SCHEDULER_MODULE, "Scheduler.init_model_worker", "BEFORE", worker))
    if not extra_keys.keys_are_namespaced():
        for module, tree in extra_keys.TREES:
            hooks.append(_Hook("extra keys", module, f"{tree}.write_backup_storage", "AROUND", extra_keys.skip_write))
            hooks.append(
                _Hook("extra keys", module, f"{tree}.prefetch_from_storage", "AROUND", extra_keys.skip_prefetch)
            )
    return hooks


def _resolves_late() -> bool:
    """Whether this release resolves its arguments apart from constructing them."""
    from sglang.srt.server_args import ServerArgs

    return hasattr(ServerArgs, "resolve_once")


def _direct_hooks() -> list[_Hook]:
    """Those of the scheduler step, which other servers shall not even pass through."""
    from sglang_tardis.sglang import load_results as results

    table = (
        (_BATCH_MODULE, "ScheduleBatch.init_new", "BEFORE", results.new_batch),
        (_SCHEDULER_MODULE, "Scheduler.run_batch", "AROUND", results.run_batch),
        (_SCHEDULER_MODULE, "Scheduler.process_batch_result", "AROUND", results.process_result),
        (_SCHEDULER_MODULE, "Scheduler.get_next_batch_to_run", "BEFORE", results.choose_batch),
        (_STREAMER_MODULE, "SchedulerOutputStreamer.stream_output", "BEFORE", results.stream_output),
        (_TREE_MODULE, "UnifiedRadixCache.finish_external_linker_loads", "AROUND", results.finish_loads),
        (_TREE_MODULE, "UnifiedRadixCache.claim_kv_row", "BEFORE", results.claim_row),
        (_LINKER_MODULE, "UnifiedCacheLinkerWrapper.reset", "BEFORE", results.reset),
    )
    return [_Hook("load results", *row) for row in table]


def _attention_hooks() -> list[_Hook]:
    """Where KV pools are sized and made, in the processes that do so."""
    from sglang_tardis.sglang import attention_pool as pool

    table = (
        (_CONFIGURATOR_MODULE, "KVCacheConfigurator.configure", "BEFORE", pool.check_configure),
        (_CONFIGURATOR_MODULE, "KVCacheConfigurator._profile_available_bytes", "AROUND", pool.profiled_bytes),
        (_POOL_MODULE, "maybe_init_custom_mem_pool", "AROUND", pool.custom_mem_pool),
        (_POOL_MODULE, "MHATokenToKVPool._create_buffers", "AROUND", pool.create_buffers),
    )
    return [_Hook("attention", *row) for row in table]


def _register_hooks() -> None:
    """Hand our hooks to SGLang's registry, for the modules this process uses; those it has already are left alone."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    known = {hook.target for hook in _hooks}
    # Child processes of a server import what they need, most of it before this; the others would pay for nothing.
    child = multiprocessing.parent_process() is not None
    wanted = _wanted_hooks()
    wanted += _direct_hooks() if _direct else []
    wanted += _attention_hooks() if _attention else []
    for hook in wanted:
        if hook.target in known:
            continue
        if hook.module not in sys.modules:
            if child or not module_exists(hook.module):
                continue
            try:
                importlib.import_module(hook.module)
            except Exception as error:
                _problems[hook.seam] = f"{hook.module} cannot be imported: {error}"
                continue
        if _resolve(hook) is None:
            continue
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
        _hooks.append(hook)


def install_late() -> None:
    """Make sure that the hooks are in place, also those of modules that were imported after the plugin was loaded.

    0.5.16 imports its tree when it builds it; with the ``dynamic`` route the plugin may not have been loaded at all.
    Called before each cache controller is built and before each backend is created.
    """
    if _installed:
        _register_hooks()
    else:
        install()
    if any(not _is_applied(hook) for hook in _hooks):
        from sglang.srt.plugins.hook_registry import HookRegistry

        HookRegistry.apply_hooks()


def install_direct() -> None:
    """Hook the scheduler's steps, for a linker of the direct door. Called by its constructor, in a scheduler process.

    Raises:
        SeamError: a hook is missing or was not taken.
    """
    global _direct
    _direct = True
    _install_in_scheduler(_direct_hooks(), "load results")


def install_attention() -> None:
    """Hook the making of KV pools, and register the attention backend, before a scheduler makes its model runner.

    Raises:
        SeamError: a hook is missing or was not taken.
    """
    global _attention
    _attention = True
    registry = importlib.import_module(_ATTENTION_REGISTRY_MODULE)
    registry.register_attention_backend(BACKEND)(_create_attention)
    _install_in_scheduler(_attention_hooks(), "attention")


def _install_in_scheduler(hooks: list[_Hook], seam: str) -> None:
    """Hook what a scheduler imports later than plugins; nothing of it is hooked in servers that do not ask for it."""
    for hook in hooks:
        importlib.import_module(hook.module)
    install_late()
    require(seam)


# ---- verifying ----------------------------------------------------------------------------------------------------


def _resolve(hook: _Hook) -> Any:
    value: Any = sys.modules.get(hook.module)
    for part in hook.path.split("."):
        if value is None:
            return None
        value = getattr(value, part, None)
    return value


def _is_applied(hook: _Hook) -> bool:
    """Whether the function that SGLang will call reaches our hook: wrappers hold what they wrap in their closure."""
    function = getattr(_resolve(hook), "__func__", _resolve(hook))
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            try:
                if cell.cell_contents is hook.function:
                    return True
            except ValueError:  # an empty cell
                continue
        function = getattr(function, "__wrapped__", None)
    return False


def check(register_first: bool = False) -> list[Seam]:
    """The state of every seam in this process; imports SGLang.

    Args:
        register_first: register and apply the hooks if SGLang's plugin loader has not been run here.
    """
    if register_first:
        install_late()
    seams = []
    try:
        _, arg = _cli_field()
        choice = BACKEND in arg.choices
        seams.append(Seam("cli choice", choice, "--hicache-storage-backend accepts tardis" if choice else "not added"))
    except Exception as error:
        seams.append(Seam("cli choice", False, f"{type(error).__name__}: {error}"))
    try:
        from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

        known = BACKEND in StorageBackendFactory._registry
        seams.append(Seam("registry", known, f"{BACKEND_MODULE}.{BACKEND_CLASS}" if known else "not registered"))
    except Exception as error:
        seams.append(Seam("registry", False, f"{type(error).__name__}: {error}"))
    optional = {"draft"}
    wanted_hooks = _wanted_hooks()
    if _direct:
        wanted_hooks += _direct_hooks()
    else:
        seams.append(_direct_seam())
    seams.append(_attention_seam())
    for name in dict.fromkeys(hook.seam for hook in wanted_hooks):
        wanted = [hook for hook in wanted_hooks if hook.seam == name]
        mine = [hook for hook in wanted if _resolve(hook) is not None]
        missed = [hook.target for hook in mine if not _is_applied(hook)]
        if missed:
            seams.append(Seam(name, False, "the hook was not applied to " + ", ".join(missed)))
        elif mine:
            seams.append(Seam(name, True, ", ".join(hook.target for hook in mine)))
        elif name in optional:
            seams.append(Seam(name, True, "not needed by this release"))
        else:
            modules = list(dict.fromkeys(hook.module for hook in wanted))
            later = [module for module in modules if module not in sys.modules and module_exists(module)]
            imported = any(module in sys.modules for module in modules)
            if later and not imported and name not in _problems:  # nothing of it is in use yet; see install_late
                seams.append(Seam(name, True, "not imported in this process: " + ", ".join(later)))
            else:
                targets = ", ".join(hook.target for hook in wanted)
                seams.append(Seam(name, False, _problems.get(name) or f"not found: {targets}"))
    return seams


def _direct_seam() -> Seam:
    """Whether this release has what the direct door would hook; it is looked at in the modules imported so far."""
    name = "load results"
    if not module_exists(_LINKER_MODULE):
        return Seam(name, True, "this release has no external linker: the settings cannot say mode direct")
    hooks = _direct_hooks()
    # A module whose import is blocked is there as None.
    missing = [hook.target for hook in hooks if sys.modules.get(hook.module) is not None and _resolve(hook) is None]
    if missing:
        return Seam(name, False, f"not found: {', '.join(missing)}")
    return Seam(name, True, "hooked in mode direct only: " + ", ".join(hook.target for hook in hooks))


def _attention_seam() -> Seam:
    """Whether KV pools of this process lie in host memory; in others, whether they could be made to."""
    from sglang_tardis.sglang import attention_mode

    name = "attention"
    if name in _problems:
        return Seam(name, False, _problems[name])
    if not module_exists(attention_mode.NEEDED_MODULE):
        return Seam(
            name, True, f"no {attention_mode.NEEDED_MODULE}: this release cannot have --attention-backend tardis"
        )
    hooks = _attention_hooks()
    missing = [hook.target for hook in hooks if sys.modules.get(hook.module) is not None and _resolve(hook) is None]
    if missing:
        return Seam(name, False, f"not found: {', '.join(missing)}")
    targets = ", ".join(hook.target for hook in hooks)
    if not _attention:
        return Seam(name, True, f"hooked with --attention-backend tardis only: {targets}")
    missed = [hook.target for hook in hooks if not _is_applied(hook)]
    if missed:
        return Seam(name, False, "the hook was not applied to " + ", ".join(missed))
    return Seam(name, True, targets)


def require(*names: str) -> None:
    """Raise SeamError naming the seam and SGLang's version unless all named seams (default: every one) hold here."""
    bad = [seam for seam in check() if not seam.ok and (not names or seam.name in names)]
    if bad:
        lines = "; ".join(f"{seam.name}: {seam.detail}" for seam in bad)
        raise SeamError(
            f"tardis cannot work with SGLang {sglang_version()} as it is installed here ({lines}). "
            "Use a supported release (0.5.16 or 0.5.23), make sure that SGLANG_PLUGINS, if set, contains 'tardis', and "
            "run 'tardis doctor' for the whole list."
        )


# ---- the hooks ----------------------------------------------------------------------------------------------------


def _create_backend(original, cls, backend_name, backend_class, storage_config, mem_pool_host):
    if backend_name != BACKEND:
        return original(cls, backend_name, backend_class, storage_config, mem_pool_host)
    install_late()
    require("factory", "zero-copy", "attach", "prefix keys", "weight updates", "draft", "extra keys")
    return backend_class(storage_config, mem_pool_host)


def unwrap(backend: Any) -> Any:
    """The storage object behind SGLang's fault injector, or the object itself."""
    return getattr(backend, "_backend", backend)


def is_ours(backend: Any) -> bool:
    """Whether a storage object of SGLang is (or wraps) a TardisStorage."""
    module = sys.modules.get(BACKEND_MODULE)
    return module is not None and isinstance(unwrap(backend), getattr(module, BACKEND_CLASS))


def _attach(original, self, storage_backend, *args, **kwargs):
    """HiCacheController.attach_storage_backend: tell the constructor who attaches it; choose zero-copy functions."""
    token = attaching_controller.set(self)
    try:
        result = original(self, storage_backend, *args, **kwargs)
    finally:
        attaching_controller.reset(token)
    if storage_backend == BACKEND:
        try:
            self.page_get_func = self._page_get_zero_copy
            self.page_set_func = self._page_set_zero_copy
        except AttributeError as error:
            self.detach_storage_backend()
            raise SeamError(
                f"SGLang {sglang_version()} has no zero-copy functions on its cache controller ({error}); tardis would "
                "have to copy every page through Python and does not do that silently."
            ) from error
    return result


def _attach_or_undo(original, self, storage_backend, *args, **kwargs):
    """HybridCacheController.attach_storage_backend: a pool that is refused must not leave half an attach."""
    try:
        result = original(self, storage_backend, *args, **kwargs)
        if storage_backend == BACKEND and self.page_set_func != self._page_set_zero_copy:
            raise SeamError(f"SGLang {sglang_version()}: the zero-copy functions were not chosen for tardis.")
        return result
    except Exception:
        if getattr(self, "enable_storage", False) and is_ours(getattr(self, "storage_backend", None)):
            self.detach_storage_backend()
        raise


def _no_draft(self, *args, **kwargs):
    if getattr(self, "has_draft", False) and getattr(self, "enable_storage", False):
        backend = unwrap(getattr(self, "storage_backend", None))
        if is_ours(backend):
            backend.refuse_pool("draft")


def _pass_prefix_keys(self, *args, **kwargs):
    """Make SGLang hand the keys of the preceding pages to set calls: their last one is the parent for eviction."""
    cache = getattr(self, "_cache", self)
    controller = getattr(cache, "cache_controller", None)
    if not kwargs.get("enable_storage") or not is_ours(getattr(controller, "storage_backend", None)):
        return None
    if getattr(cache, "page_size", 0) < _MIN_PAGE_SIZE_FOR_PREFIX_KEYS:
        return None
    return (self, *args), {**kwargs, "hicache_storage_pass_prefix_keys": True}
