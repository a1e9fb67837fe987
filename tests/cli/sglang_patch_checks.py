# SPDX-License-Identifier: Apache-2.0
"""What a patched SGLang does, run in a process of its own with that SGLang in front on PYTHONPATH.

    python sglang_patch_checks.py FOLDER        (see test_sglang_patch.py)

SGLang is imported once, which is what takes the time; each check then runs in a fork of that process, so that none sees
the hooks of another. Prints one JSON object: name of the check -> null, or the traceback of its failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import logging
import os
import sys
import traceback
import types
from contextlib import redirect_stderr
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "demo" / "cpu_support"), str(ROOT / "tests" / "sglang")]
FOLDER = Path(sys.argv[1])
OLD = metadata.version("sglang") == "0.5.16"


class Warnings(logging.Handler):
    """Collects what SGLang's and our loggers complain about."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []
        logging.getLogger().addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


def parse(backend):
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(["--model-path", "m", "--hicache-storage-backend", backend]).hicache_storage_backend


def choices():
    from sglang_tardis.sglang import seams

    return seams._cli_field()[1].choices


def load_plugins():
    import sglang.srt.plugins as plugins

    assert not plugins._plugins_loaded
    plugins.load_plugins()


def round_trip(name):
    """Store a prompt through the real controller and tree, lose the host's memory, get it back; bytes are compared."""
    from tardis_cpu_support import apply_cpu_support

    apply_cpu_support()
    model = FOLDER / f"model-{name}"
    if OLD:
        import sglang.srt.managers.cache_controller as cache_controller
        import sglang16_checks as checks
        import torch
        from sglang.srt.runtime_context import get_parallel

        cache_controller.device_module = (
            torch.cpu
        )  # this release takes CUDA's streams even where tensors are on the CPU
        rendezvous = f"file://{FOLDER / ('rendezvous-' + name)}"
        torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
        checks.FOLDER = FOLDER
        checks.checkpoint(model.name, 1)
        with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1):
            for expected in ((0, 0, 64), (0, 64, 0)):
                server = checks.Server(FOLDER / f"store-{name}", model)
                zero_copy(server.controller)
                assert server.prefill(checks.tokens(1, 4)) == expected
                server.close()
        return
    from tree_server import TreeServer, write_checkpoint

    write_checkpoint(model)
    tokens = list(range(3, 67))
    for storage in (0, 64):
        with TreeServer(FOLDER / f"store-{name}", model) as server:
            zero_copy(server.cache.cache_controller)
            split = server.prefill(tokens)
            assert (split.storage, split.computed) == (storage, 64 - storage), split


def zero_copy(controller):
    from sglang_tardis.sglang.storage import TardisStorage

    assert type(controller.storage_backend) is TardisStorage
    assert controller.page_get_func == controller._page_get_zero_copy
    assert controller.page_set_func == controller._page_set_zero_copy


def every_seam_once():
    """All hooks are there, each of them a single time."""
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang_tardis.sglang import seams

    assert not [seam for seam in seams.check() if not seam.ok]
    assert choices().count("tardis") == 1
    for hook in seams._hooks:
        ours = [one for one in HookRegistry._hooks[hook.target] if hook.function in tuple(one)]
        assert len(ours) == 1, (hook.target, ours)


def check_command_line_without_plugins():
    """Programs that read the command line before they load plugins."""
    assert parse("tardis") == "tardis" and parse("file") == "file"
    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            parse("tardiss")
    except SystemExit:
        assert "'tardis'" in errors.getvalue()
    else:
        raise AssertionError("an unknown backend was accepted")
    assert choices().count("tardis") == 1


def check_round_trip_without_plugins():
    """No plugin is ever loaded in this process: the backend is one of SGLang's own."""
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
    from sglang_tardis.sglang import seams

    warnings = Warnings()
    assert StorageBackendFactory._registry["tardis"]["class_name"] == "TardisStorage"
    assert not seams._installed
    round_trip("native")
    import sglang.srt.plugins as plugins

    assert not plugins._plugins_loaded
    assert not [line for line in warnings.lines if "already registered" in line], warnings.lines


def check_hooks_without_entry_point():
    """Also where SGLANG_PLUGINS leaves tardis out, its hooks are in place from the start."""
    os.environ["SGLANG_PLUGINS"] = "nobody"
    load_plugins()
    every_seam_once()
    round_trip("builtin")
    every_seam_once()


def check_patch_and_plugin_together():
    """The entry point and the patch: nothing is registered twice, nobody is warned."""
    os.environ.pop("SGLANG_PLUGINS", None)
    assert "tardis" in metadata.entry_points(group="sglang.srt.plugins").names
    warnings = Warnings()
    load_plugins()
    every_seam_once()
    round_trip("both")
    every_seam_once()
    assert not [line for line in warnings.lines if "already registered" in line], warnings.lines


def check_ray_scheduler_loads_plugins():
    """The first thing that a scheduler does that Ray starts; of Ray itself only the decorator is needed for that."""
    import sglang.srt.plugins as plugins

    sys.modules["ray"] = ray = types.ModuleType("ray")
    ray.remote = lambda actor: actor
    # By its file: the package's __init__ wants more of Ray than this decorator.
    file = Path(plugins.__file__).parents[1] / "ray" / "scheduler_actor.py"
    spec = importlib.util.spec_from_file_location("scheduler_actor", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    SchedulerActor = module.SchedulerActor

    assert not plugins._plugins_loaded
    sys.modules["sglang.srt.managers.scheduler"] = None  # what it imports next
    try:
        SchedulerActor(**dict.fromkeys(SchedulerActor.__init__.__annotations__))
    except ImportError:
        pass
    else:
        raise AssertionError("the scheduler was imported")
    assert plugins._plugins_loaded
    every_seam_once()


def preload():
    """What all checks import; none of it registers anything."""
    import sglang_tardis.sglang.storage  # noqa: F401
    import torch
    from sglang_tardis.sglang import seams

    torch.set_num_threads(1)

    for module in {hook.module for hook in seams._wanted_hooks()}:
        if seams.module_exists(module):
            importlib.import_module(module)
    if not OLD:
        import tree_server  # noqa: F401
    assert not seams._installed
    # The page hash is compiled once for each path of its source: give the installed one's, not the copy's.
    from sglang.srt.mem_cache.cpp_utils import native_hash

    native_hash.__file__ = os.path.realpath(native_hash.__file__)


def outcome(check):
    """Run a check in a fork; None or its traceback."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            check()
        except BaseException:
            text = traceback.format_exc()
        os.write(writer, text[-60_000:].encode())
        os._exit(0 if not text else 1)
    os.close(writer)
    with open(reader, "rb") as stream:
        text = stream.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return text or (f"exit status {status}" if status else None)


def main():
    preload()
    checks = {name: value for name, value in globals().items() if name.startswith("check_")}
    print("RESULTS " + json.dumps({name: outcome(check) for name, check in checks.items()}), flush=True)


if __name__ == "__main__":
    main()
