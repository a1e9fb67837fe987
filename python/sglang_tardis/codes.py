# SPDX-License-Identifier: Apache-2.0
"""The result codes of the C ABI by number (``tardis_code`` in ``tardis/tardis.h``)."""

from __future__ import annotations

__all__ = ["CODES"]

CODES = (
    "ok",
    "invalid_argument",
    "not_found",
    "io",
    "corrupt",
    "busy",
    "no_space",
    "unsupported_format",
    "permission",
    "closed",
    "internal",
)
