# SPDX-License-Identifier: Apache-2.0
"""sglang-tardis: a KV-cache tier for SGLang on local NVMe.

Importing this package imports neither torch, SGLang nor the C++ core; each module imports what it needs.
"""

from __future__ import annotations

from importlib import metadata as _metadata

try:
    __version__ = _metadata.version("sglang-tardis")
except _metadata.PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+source"

__all__ = ["__version__"]
