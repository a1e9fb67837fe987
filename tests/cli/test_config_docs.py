# SPDX-License-Identifier: Apache-2.0
"""docs/configuration.md is what the settings say."""

from pathlib import Path

import msgspec
from sglang_tardis.cli.config_docs import configuration_page, main, settings_table
from sglang_tardis.config import SGLANG_KEYS, TardisConfig, load_config

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_committed_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == configuration_page(), (
        "run: python -m sglang_tardis.cli.config_docs --write docs/configuration.md"
    )


def test_every_setting_and_every_key_of_sglang_has_a_row():
    rows = settings_table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [field.name for field in msgspec.structs.fields(TardisConfig)]
    assert all(f"| `{key}` |" in configuration_page() for key in SGLANG_KEYS)


def test_the_documented_defaults_are_the_defaults():
    for row in settings_table().splitlines()[2:]:
        name, default = row.split("|")[1].strip(" `"), row.split("|")[3].strip(" `")
        setting = msgspec.json.decode(default)
        assert setting == getattr(TardisConfig(), name)
        load_config({name: setting}, {"HOME": "/root"})


def test_writing(tmp_path: Path, capsys):
    assert main(["--write", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == configuration_page()
    assert main([]) == 0
    assert capsys.readouterr().out == configuration_page()
