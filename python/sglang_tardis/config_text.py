# SPDX-License-Identifier: Apache-2.0
"""Settings as text: JSON, or a file of JSON, TOML or YAML."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["ConfigError", "parse_text", "show"]

_MAX_CONFIG_FILE_BYTES = 1 << 20


class ConfigError(ValueError):
    """A setting is unknown or wrong; the message names key, value, source and what is allowed."""


def show(value: object) -> str:
    """A value as messages show it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits, a structure of thousands of levels
        text = f"<{type(value).__name__} too large to show>"
    return text if len(text) <= 80 else text[:77] + "..."


def parse_text(text: str, source: str) -> tuple[Mapping[str, Any], str]:
    """Settings from JSON text or @file, and the source to name in messages."""
    text = text.strip()
    if not text:
        return {}, source
    parse: Callable[[str], Any] = _parse_json
    if text.startswith("@"):
        name = text[1:]
        source = f"{source} (file {name})"
        parsers = {".json": _parse_json, ".toml": _parse_toml, ".yaml": _parse_yaml, ".yml": _parse_yaml}
        suffix = os.path.splitext(name)[1].lower()
        if suffix not in parsers:
            raise ConfigError(
                f"{source}: unknown kind of file {suffix!r}; expected a name ending in {', '.join(parsers)}"
            )
        parse = parsers[suffix]
        text = _read_file(name, source)
    try:
        settings = parse(text)
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except ValueError as error:
        hint = "" if "file" in source else '; expected JSON such as {"path": "/nvme/tardis"}, or @file'
        raise ConfigError(f"{source}: cannot be parsed ({error}){hint}") from None
    if settings is None:  # an empty YAML file
        settings = {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{source}: expected an object of settings, got {show(settings)}")
    return settings, source


def _read_file(name: str, source: str) -> str:
    try:
        fd = os.open(os.path.expanduser(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(f"{source}: not a regular file")
            data = file.read(_MAX_CONFIG_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name; ConfigError is one, too
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{source}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > _MAX_CONFIG_FILE_BYTES:
        raise ConfigError(f"{source}: larger than {_MAX_CONFIG_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: not UTF-8 text (byte {error.start})") from None


def _parse_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise ConfigError(f"key {key!r:.80} is given twice")
            result[key] = value
        return result

    def refuse(constant: str) -> None:
        raise ConfigError(f"{constant} is not a value")

    return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)


def _parse_toml(text: str) -> Any:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        try:
            import tomli as tomllib  # type: ignore[no-redef]
        except ModuleNotFoundError:
            raise ConfigError("reading TOML on Python 3.10 needs the package tomli; use JSON instead") from None
    return tomllib.loads(text)


def _parse_yaml(text: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError("reading YAML needs the package PyYAML; use JSON instead") from None

    class UniqueKeys(yaml.SafeLoader):
        """SafeLoader that refuses a key given twice instead of keeping the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key_node, _ in node.value:
                if key_node.value in seen:
                    raise ConfigError(f"key {key_node.value!r:.80} is given twice")
                if isinstance(key_node.value, str):
                    seen.add(key_node.value)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, UniqueKeys)
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from None
