# SPDX-License-Identifier: Apache-2.0
"""What was aimed at, and what was found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

Rows = Mapping[tuple[str, str, str], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Check:
    """One aim: what was found, and what it is not to exceed (or, with `least`, to reach)."""

    name: str
    found: float
    limit: float
    unit: str
    least: bool = False

    @property
    def held(self) -> bool:
        return self.found >= self.limit if self.least else self.found <= self.limit

    def text(self) -> str:
        """One line."""
        sign = ">=" if self.least else "<="
        return f"{'ok  ' if self.held else 'MISS'} {self.name}: {self.found:.3f} {sign} {self.limit:.3f} {self.unit}"

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "held": self.held}
