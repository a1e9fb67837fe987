# SPDX-License-Identifier: Apache-2.0
"""Settings: sources and precedence, strictness, messages, hostile input."""

import errno
import json
import os
import pwd
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_tardis.config import (
    SGLANG_KEYS,
    ConfigError,
    TardisConfig,
    allowed_values,
    load_config,
    parse_size,
)

HOME = "/somebody"
FLAG = "--hicache-storage-backend-extra-config"
GIB = 2**30
FIELDS = [field.name for field in msgspec.structs.fields(TardisConfig)]


def environ(**extra: str) -> dict[str, str]:
    return {"HOME": HOME, **extra}


def load(extra: Any = None, **env: str) -> TardisConfig:
    return load_config(extra, environ(**env))


# --- defaults, sources, precedence


def test_defaults():
    config = load()
    assert config.path == f"{HOME}/.cache/sglang-tardis"
    assert (config.capacity_bytes, config.segment_bytes) == (0, 0)
    assert config.free_space_floor_bytes == 2 * GIB
    assert config.flush_group_bytes == 256 * 2**20
    assert config.verify_reads is True and config.weights_revision is None
    assert msgspec.structs.replace(TardisConfig(), path=config.path) == config


def test_every_field_is_documented_and_has_a_default():
    for field in msgspec.structs.fields(TardisConfig):
        meta = field.type.__metadata__[0]
        assert len(meta.description) > 20, field.name
        assert not field.required
        assert allowed_values(field.name)


def test_a_key_of_a_higher_source_overrides_only_itself(tmp_path: Path):
    file = tmp_path / "tardis.toml"
    file.write_text('path = "/env"\nqueue_depth = 7\nengine = "sync"\n')
    config = load({"queue_depth": 9, "capacity": "1GiB"}, TARDIS_CONFIG=f"@{file}")
    assert (config.path, config.queue_depth, config.engine) == ("/env", 9, "sync")
    assert config.capacity_bytes == GIB and config.io_workers == TardisConfig().io_workers
    assert load(None, TARDIS_CONFIG='{"queue_depth": 5}').queue_depth == 5
    assert load({}, TARDIS_CONFIG="  ").queue_depth == TardisConfig().queue_depth


def test_a_mistake_in_a_lower_source_counts_even_if_overridden():
    with pytest.raises(ConfigError, match="TARDIS_CONFIG"):
        load({"queue_depth": 9}, TARDIS_CONFIG='{"queue_depth": "many"}')


def test_sglang_keys_pass_through():
    extra = dict.fromkeys(SGLANG_KEYS, "anything at all")
    assert load({**extra, "queue_depth": 3}).queue_depth == 3
    for key in (
        "prefetch_threshold prefetch_timeout_base prefetch_timeout_per_ki_token hicache_storage_pass_prefix_keys "
        "tp_lcm_size backend_name module_path class_name interface_v1"
    ).split():
        assert key in SGLANG_KEYS
    assert not set(SGLANG_KEYS) & set(FIELDS)


def test_sglang_keys_in_the_environment_are_a_mistake():
    with pytest.raises(ConfigError, match=rf"prefetch_threshold.*TARDIS_CONFIG.*{FLAG}"):
        load(TARDIS_CONFIG='{"prefetch_threshold": 256}')


def test_files_in_each_format(tmp_path: Path):
    pytest.importorskip("yaml", reason="PyYAML, which reads .yaml settings, is not installed")
    texts = {
        "a.json": '{"path": "/p", "queue_depth": 3, "verify_reads": false}',
        "a.toml": 'path = "/p"\nqueue_depth = 3\nverify_reads = false\n',
        "a.yaml": "path: /p\nqueue_depth: 3\nverify_reads: false\n",
        "a.YML": "path: /p\nqueue_depth: 3\nverify_reads: no\n",
        "bom.json": '\ufeff{"path": "/p", "queue_depth": 3, "verify_reads": false}',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        for config in (load(f"@{tmp_path / name}"), load(None, TARDIS_CONFIG=f"@{tmp_path / name}")):
            assert (config.path, config.queue_depth, config.verify_reads) == ("/p", 3, False)
    (tmp_path / "empty.yaml").write_text("")
    assert load(f"@{tmp_path / 'empty.yaml'}") == load()


def test_mapping_and_text_are_equal():
    extra = {"path": "/p", "capacity": "1.5 TB", "prefetch_threshold": 1, "weights_revision": "v2"}
    assert load(extra) == load(json.dumps(extra)) == load(f"  {json.dumps(extra)}\n")


# --- sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (123, 123),
        ("123", 123),
        ("123 B", 123),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("1.5 TB", 1_500_000_000_000),
        ("200GiB", 200 * GIB),
        (" 200 gib ", 200 * GIB),
        ("0.5KiB", 512),
        ("0.1KiB", 102),
        ("2PiB", 2**51),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


WRONG_SIZES = [
    -1, 2**63, 10**40, True, 1.5, float("nan"), float("inf"), None, [], {}, b"1",
    "", " ", "-1", "+1", "1e9", "1_000", "0x10", "200G", "200 Gib/s", "GiB", "1..5GB", ".5GB", "5.GB", "1,5GB", "1 5",
    "nan", "inf", "\u0661\u0662", "1" * 400, "99999999PiB", "1GiB\x00", "auto",
]  # fmt: skip


@pytest.mark.parametrize("value", WRONG_SIZES, ids=lambda value: ascii(value)[:20])
def test_wrong_sizes(value):
    with pytest.raises(ValueError):
        parse_size(value)
    for key in ("free_space_floor", "flush_bytes") + (() if value == "auto" else ("capacity", "segment_size")):
        with pytest.raises(ConfigError, match=rf"setting '{key}' = .*{FLAG}.*Allowed: bytes"):
            load({key: value})


def test_auto_and_zero():
    for value in (0, "auto", " AUTO ", "0"):
        assert load({"capacity": value, "segment_size": value}).capacity_bytes == 0
    with pytest.raises(ConfigError, match="at least 1"):
        load({"flush_bytes": 0})
    assert load({"free_space_floor": 0}).free_space_floor_bytes == 0


@given(st.integers(0, 2**40), st.sampled_from(["B", "kB", "MB", "KiB", "MiB"]), st.sampled_from(["", " "]))
@settings(deadline=None, max_examples=50)
def test_whole_numbers_are_exact(number, unit, space):
    factor = {"B": 1, "kB": 10**3, "MB": 10**6, "KiB": 2**10, "MiB": 2**20}[unit]
    assert parse_size(f"{number}{space}{unit}") == number * factor


# --- strictness


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("queue_depth", True, "integer from 0 to 4096"),
        ("queue_depth", "128", "integer"),
        ("queue_depth", 128.0, "integer"),
        ("queue_depth", -3, "integer"),
        ("queue_depth", 4097, "integer"),
        ("queue_depth", 10**40, "integer"),
        ("queue_depth", None, "integer"),
        ("queue_depth", float("nan"), "integer"),
        ("queue_depth", [1], "integer"),
        ("queue_depth", {"a": {"b": 1}}, "integer"),
        ("io_workers", -1, "integer from 0 to 256"),
        ("bounce_buffers", False, "integer"),
        ("flush_interval_ms", 0, "integer from 1 to 60000"),
        ("engine", "aio", '"auto", "io_uring", "sync"'),
        ("engine", None, "one of"),
        ("engine", ["sync"], "one of"),
        ("direct_io", True, '"auto", "on", "off"'),
        ("placement", "drives", '"objects", "layers"'),
        ("verify_reads", 0, "true or false"),
        ("verify_reads", "false", "true or false"),
        ("verify_reads", None, "true or false"),
        ("path", "", "text"),
        ("path", 7, "text"),
        ("path", None, "text"),
        ("path", b"/x", "text"),
        ("path", [], "text, or a list of 1 to 16 texts"),
        ("path", [f"/{number}" for number in range(17)], "list of 1 to 16"),
        ("path", ["/a", 3], "list of 1 to 16"),
        ("path", ["/a", ""], "list of 1 to 16"),
        ("path", ["/a", ["/b"]], "list of 1 to 16"),
        ("path", ["/a", None], "list of 1 to 16"),
        ("weights_revision", "", "text of 1 to 256 characters, or null"),
        ("weights_revision", "x" * 257, "characters"),
        ("weights_revision", 3, "characters"),
    ],
)
def test_ill_typed_values_name_key_value_source_and_what_is_allowed(key, value, allowed):
    sources = {FLAG: lambda: load({key: value})}
    if not isinstance(value, (bytes, float)):  # what JSON can say
        sources["TARDIS_CONFIG"] = lambda: load(None, TARDIS_CONFIG=json.dumps({key: value}))
    for source, load_it in sources.items():
        with pytest.raises(ConfigError) as caught:
            load_it()
        message = str(caught.value)
        assert f"setting {key!r} = {repr(value)[:70]}" in message and source in message and allowed in message
        assert len(message) < 600 and "\n" not in message


def test_every_default_is_a_valid_value():
    for field in msgspec.structs.fields(TardisConfig):
        assert getattr(load({field.name: field.default}), field.name) == getattr(load(), field.name)


def test_an_integer_that_python_refuses_to_print():
    for key in ("queue_depth", "capacity", "path", "nonsense"):
        with pytest.raises(ConfigError, match="too large to show"):
            load({key: 10**6000})


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [("pth", "path"), ("que_depth", "queue_depth"), ("Capacity", "capacity"), ("directio", "direct_io"), ("zzz", None)],
)
def test_unknown_keys_suggest_the_closest(key, suggestion):
    with pytest.raises(ConfigError) as caught:
        load({key: 1})
    message = str(caught.value)
    assert repr(key) in message and FLAG in message and "= 1 " in message
    assert all(name in message for name in FIELDS)
    assert ("Did you mean" in message) == (suggestion is not None)
    if suggestion:
        assert f"Did you mean {suggestion!r}?" in message


@pytest.mark.parametrize("key", [1, None, b"path", ("path",), "x" * 100_000, "pa\nth", ""])
def test_odd_keys(key):
    with pytest.raises(ConfigError, match="unknown setting") as caught:
        load({key: 1})
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        '{"path": "/a", "path": "/b"}',
        '{"capacity": NaN}',
        '{"prefetch_timeout_base": NaN}',
        '{"capacity": Infinity}',
        '{"capacity": -Infinity}',
        '{"path": "/a"',
        "path=/a",
        "[]",
        "null]",
        "3",
        '"path"',
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"queue_depth": ' + "9" * 6000 + "}",
        '{"path": "\\ud800"}',
        "@",
        "@ ",
        "@/nonexistent/tardis.json",
        "@/tmp",
        "@/dev/null",
        "@/dev/zero.json",
        "@tardis.ini",
        "@/nonexistent\0.json",
    ],
    ids=lambda text: text[:24],
)
def test_hostile_text(text):
    for load_it, source in (
        (lambda: load(text), FLAG),
        (lambda: load(None, TARDIS_CONFIG=text), "TARDIS_CONFIG"),
    ):
        with pytest.raises(ConfigError, match=re.escape(source)) as caught:
            load_it()
        assert len(str(caught.value)) < 700


def test_hostile_files(tmp_path: Path):
    (tmp_path / "latin.json").write_bytes(b'{"path": "/caf\xe9"}')
    (tmp_path / "twice.json").write_text('{"path": "/a", "path": "/b"}')
    (tmp_path / "twice.toml").write_text('path = "/a"\npath = "/b"\n')
    (tmp_path / "twice.yaml").write_text("path: /a\npath: /b\n")
    (tmp_path / "bomb.yaml").write_text("a: &a [x, x]\nb: &b [*a, *a]\npath: *b\n")
    (tmp_path / "object.yaml").write_text("path: !!python/object/apply:os.system ['false']\n")
    (tmp_path / "broken.yaml").write_text("path: [\n")
    (tmp_path / "list.yaml").write_text("- path\n")
    (tmp_path / "broken.toml").write_text("path = \n")
    (tmp_path / "large.json").write_text('{"path": "/a"}' + " " * (1 << 20))
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "fifo.json")
    for path in sorted(tmp_path.iterdir()):
        if path.suffix == ".yaml":
            pytest.importorskip("yaml", reason="PyYAML, which reads .yaml settings, is not installed")
        with pytest.raises(ConfigError, match=re.escape(path.name)) as caught:
            load(f"@{path}")
        assert len(str(caught.value)) < 700, path.name
    if os.geteuid() != 0:
        (tmp_path / "secret.json").write_text("{}")
        (tmp_path / "secret.json").chmod(0)
        with pytest.raises(ConfigError, match="Permission denied"):
            load(f"@{tmp_path / 'secret.json'}")


def test_extra_config_of_a_wrong_kind():
    for extra in ([], 3, b"{}", object()):
        with pytest.raises(ConfigError, match="mapping"):
            load(extra)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*FIELDS, *SGLANG_KEYS]) | st.text(max_size=6), json_values, max_size=3))
@settings(deadline=None, max_examples=150)
def test_anything_gives_a_config_or_a_config_error(extra):
    try:
        config = load(extra)
    except ConfigError:
        return
    assert set(extra) <= set(FIELDS) | set(SGLANG_KEYS)
    assert all(map(os.path.isabs, (config.folder, *config.more_paths)))
    assert config.flush_group_bytes > 0 and 0 <= config.queue_depth <= 4096


# --- path


def test_path_is_expanded():
    env = environ(DISK="/nvme0", USER_DIR="kv")
    assert load_config({"path": "$DISK/${USER_DIR}/store"}, env).path == "/nvme0/kv/store"
    assert load_config({"path": "~/kv"}, env).path == f"{HOME}/kv"
    assert load_config({"path": "~"}, env).path == HOME
    assert load_config({"path": "/a/../b//c/"}, env).path == "/b/c"
    assert load_config({"path": "/a b/ü"}, env).path == "/a b/ü"
    assert load_config({"path": "~root/kv"}, env).path == f"{pwd.getpwnam('root').pw_dir}/kv"


# Texts that cannot be a folder, and what is said of them.
NO_FOLDERS = [
    ("relative", "absolute"),
    ("./x", "absolute"),
    ("$UNSET_VARIABLE/x", "UNSET_VARIABLE is not set"),
    ("/x/${EMPTY}", "EMPTY is not set"),
    ("~no-such-user-here/x", "absolute"),
    ("/x\0y", "NUL"),
    ("/dev/null", "/dev/null is not a folder"),
    ("/dev/null/below", "/dev/null is not a folder"),
    ("/" + "x" * 300, "name too long"),
    ("/\ud800", "encoded"),
]


@pytest.mark.parametrize(("path", "problem"), NO_FOLDERS)
def test_paths_that_cannot_be_a_folder(path, problem):
    with pytest.raises(ConfigError, match=rf"'path' = .*{FLAG}.*(?i:{problem})"):
        load_config({"path": path}, environ(EMPTY=""))


def test_path_that_is_a_file(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "x" / "y"):
        with pytest.raises(ConfigError, match="file is not a folder"):
            load({"path": str(path)})
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(ConfigError, match="not a folder"):
        load({"path": str(tmp_path / "link")})
    assert load({"path": str(tmp_path / "new" / "store")}).path == str(tmp_path / "new" / "store")


# --- several paths


def test_one_folder_is_the_stores_own():
    for path in ("/a/b", ["/a/b"], ("/a/b",)):
        config = load({"path": path})
        assert (config.path, config.folder, config.more_paths) == ("/a/b", "/a/b", ())
        assert config == load({"path": "/a/b"})


def test_a_list_of_folders_from_every_source(tmp_path: Path):
    pytest.importorskip("yaml", reason="PyYAML, which reads .yaml settings, is not installed")
    folders = ("/a", "/b/c", "/d")
    (tmp_path / "a.json").write_text('{"path": ["/a", "/b/c", "/d"]}')
    (tmp_path / "a.toml").write_text('path = ["/a", "/b/c", "/d"]\n')
    (tmp_path / "a.yaml").write_text("path:\n- /a\n- /b/c\n- /d\n")
    sources = [{"path": list(folders)}, {"path": folders}, '{"path": ["/a", "/b/c", "/d"]}']
    sources += [f"@{file}" for file in sorted(tmp_path.iterdir())]
    for source in sources:
        assert load(source).path == folders
        if isinstance(source, str):
            assert load(None, TARDIS_CONFIG=source).path == folders
    assert load({"path": list(folders)}).folder == "/a"
    assert load({"path": list(folders)}).more_paths == ("/b/c", "/d")
    assert hash(load({"path": list(folders)})) == hash(load({"path": folders}))


def test_an_earlier_source_overrides_the_whole_list():
    text = '{"path": ["/a", "/b"]}'
    assert load({"path": "/c"}, TARDIS_CONFIG=text).path == "/c"
    assert load({"path": ["/c", "/d"]}, TARDIS_CONFIG=text).path == ("/c", "/d")
    assert load({"queue_depth": 1}, TARDIS_CONFIG=text).path == ("/a", "/b")


def test_every_folder_of_a_list_is_expanded():
    config = load_config({"path": ["~/kv", "$DISK/kv", "/x/../y//kv/"]}, environ(DISK="/nvme1"))
    assert config.path == (f"{HOME}/kv", "/nvme1/kv", "/y/kv")
    assert len(load({"path": [f"/{number}" for number in range(16)]}).more_paths) == 15


@pytest.mark.parametrize(
    "folders",
    [["/a", "/a"], ["/a", "/b", "/b/"], ["/a", "/b", "/x/../a"], ["/somebody/kv", "~/kv"]],
)
def test_a_folder_given_twice(folders):
    with pytest.raises(ConfigError, match=rf"setting 'path' from {FLAG}: the folder '.*given twice; name each"):
        load({"path": folders})


@pytest.mark.parametrize(("path", "problem"), NO_FOLDERS)
def test_the_folder_at_fault_is_named(path, problem):
    for folders in ([path, "/b"], ["/a", path], ["/a", "/b", path, "/c"]):
        with pytest.raises(ConfigError, match=rf"'path' = .*{FLAG}.*(?i:{problem})") as caught:
            load_config({"path": folders}, environ(EMPTY=""))
        assert f"'path' = {repr(path)[:70]}" in str(caught.value)


def test_a_drive_that_fails_stops_only_its_own_store(monkeypatch):
    """The store goes on without a further folder; whether it must is the core's to find out."""
    stat = os.stat

    def failing(path, *args, **named):
        if str(path).startswith("/broken"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return stat(path, *args, **named)

    monkeypatch.setattr("sglang_tardis.config.os.stat", failing)
    assert load({"path": ["/a", "/broken/kv"]}).path == ("/a", "/broken/kv")
    for path in ("/broken/kv", ["/broken/kv", "/a"]):
        with pytest.raises(ConfigError, match="Input/output error"):
            load({"path": path})


def test_config_is_frozen_and_closed():
    with pytest.raises(AttributeError):
        load().queue_depth = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        TardisConfig(nonsense=1)  # type: ignore[call-arg]


# --- what the store gets


def test_store_options():
    pytest.importorskip("sglang_tardis._core", reason="the C++ core is not built: pip install .")
    from sglang_tardis import store

    options = load(
        {
            "capacity": "3GiB",
            "segment_size": "8MiB",
            "free_space_floor": 5,
            "engine": "sync",
            "direct_io": "off",
            "queue_depth": 11,
            "io_workers": 12,
            "bounce_buffers": 13,
            "flush_interval_ms": 14,
            "flush_bytes": 15,
            "verify_reads": False,
            "placement": "layers",
        }
    ).store_options(4096)
    assert options == store.StoreOptions(
        capacity_bytes=3 * GIB,
        segment_bytes=8 << 20,
        object_bytes_hint=4096,
        free_space_floor=5,
        engine="sync",
        direct_io="off",
        queue_depth=11,
        io_workers=12,
        bounce_buffers=13,
        flush_bytes=15,
        flush_milliseconds=14,
        verify_reads=False,
        more_paths=(),  # exactly: no further folders
        placement="layers",
    )
    assert load({"path": ["/a", "/b", "/c"]}).store_options().more_paths == ("/b", "/c")
