# SPDX-License-Identifier: Apache-2.0
"""docs/configuration.md, generated from the settings: `python -m sglang_tardis.cli.config_docs --write FILE`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import msgspec

from ..config import (
    ENVIRONMENT_VARIABLE,
    EXTRA_CONFIG_FLAG,
    SGLANG_KEYS,
    TardisConfig,
    allowed_values,
    is_size,
    takes_auto,
)

_INTRODUCTION = f"""\
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Generated from the settings: python -m sglang_tardis.cli.config_docs --write docs/configuration.md -->

# Configuration

Every setting has a default; none needs to be set. Settings come from, in this order:

1. `{EXTRA_CONFIG_FLAG}`: JSON, or `@file` with a name ending in .json, .toml or .yaml;
2. the environment variable `{ENVIRONMENT_VARIABLE}`: the same;
3. the defaults below.

A key set in an earlier source overrides that key only. An unknown key, a key given twice, a value of another type or
out of bounds stops the start with a message that names key, value, source and what is allowed.

```sh
python -m sglang.launch_server --model-path ... --enable-hierarchical-cache --hicache-storage-backend tardis \\
  {EXTRA_CONFIG_FLAG} '{{"path": "/nvme/tardis", "capacity": "200GiB"}}'
```

or, for servers and the `tardis` command alike:

```sh
export {ENVIRONMENT_VARIABLE}='{{"path": "/nvme/tardis", "capacity": "200GiB"}}'
export {ENVIRONMENT_VARIABLE}=@/etc/tardis.toml
```

A store keeps the `segment_size` that it was made with; another one given later is an error. Another
`capacity` given later becomes the store's. `tardis doctor` shows the path that will be used for I/O, and why.

A list in `path` spreads the store over several folders, best one a drive: `"path": ["/nvme0/tardis", "/nvme1/tardis"]`.
See [several drives](quickstart.md#several-drives).

## Settings

"""

_SIZES = """
A *size* is a number of bytes, or text with a unit: B, kB, MB, GB, TB, PB (powers of 1000) or KiB, MiB, GiB, TiB, PiB
(powers of 1024), such as `"200GiB"` or `"1.5 TB"`. A bare letter (`"200G"`) is refused: tools disagree about it.

## SGLang's own keys

These belong to SGLang and pass through the extra config. In `{variable}` they are refused: SGLang does not read it.

"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _default(field: msgspec.structs.FieldInfo) -> str:
    return f"`{json.dumps(field.default)}`"


def _type(name: str) -> str:
    if is_size(name):
        return "size or `auto`" if takes_auto(name) else "size"
    return allowed_values(name)


def settings_table() -> str:
    """The table of settings, one row each."""
    rows = ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(TardisConfig):
        meaning = next(part.description for part in field.type.__metadata__ if isinstance(part, msgspec.Meta))
        rows.append(f"| `{field.name}` | {_cell(_type(field.name))} | {_default(field)} | {_cell(meaning)} |")
    return "\n".join(rows) + "\n"


def configuration_page() -> str:
    """The whole page."""
    sglang = [
        "| Key | Whose and what |",
        "|---|---|",
        *(f"| `{key}` | {_cell(text)} |" for key, text in SGLANG_KEYS.items()),
    ]
    return _INTRODUCTION + settings_table() + _SIZES.format(variable=ENVIRONMENT_VARIABLE) + "\n".join(sglang) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Write the page to a file, or print it."""
    parser = argparse.ArgumentParser(prog="python -m sglang_tardis.cli.config_docs", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="file to write; without it the page is printed")
    args = parser.parse_args(argv)
    if args.write is None:
        sys.stdout.write(configuration_page())
    else:
        args.write.write_text(configuration_page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
