# SPDX-License-Identifier: Apache-2.0
"""SGLang's own settings as they are in effect in this process, on every supported release."""

from __future__ import annotations

from typing import Any

__all__ = ["ServerSettings"]


class ServerSettings:
    """Read access to SGLang's resolved server arguments by field name.

    Newer releases keep the operator's input in one record and publish the resolved values in namespaces beside it;
    older ones resolve in place. Both are asked here, the published values first.
    """

    def __init__(self, server_args: Any = None) -> None:
        """Use the process's published arguments, or those given."""
        self._args = _published_args() if server_args is None else server_args
        self._paths: dict[str, str] = {}
        if server_args is None:
            self._paths = _namespace_paths(self._args)

    def get(self, name: str, default: Any = None) -> Any:
        """The value in effect of one server argument; `default` if this release does not have it."""
        path = self._paths.get(name)
        if path is not None:
            try:
                return _published_value(path, name)
            except Exception:  # not published in this process (tools, tests): the input is the best answer
                pass
        value = getattr(self._args, name, default)
        return default if value is None else value


def _published_args() -> Any:
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except Exception:
        return None


def _namespace_paths(server_args: Any) -> dict[str, str]:
    try:
        from sglang.srt.arg_groups.arg_utils import namespace_of

        return dict(namespace_of(type(server_args)))
    except Exception:
        return {}


def _published_value(path: str, name: str) -> Any:
    from sglang.srt import runtime_context

    top, *rest = path.split(".")
    bag = runtime_context.get_parallel() if top == "parallel" else runtime_context.get_context().config_bag(top)
    for part in rest:
        bag = getattr(bag, part)
    return getattr(bag, name)
