# SPDX-License-Identifier: Apache-2.0
"""The README's performance tables are those of bench/results."""

import pathlib

import tables

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"


def test_performance_tables_come_from_the_results():
    text = README.read_text("utf-8")
    assert "\n".join(tables.ttft_table()) in text
    assert "\n".join(tables.store_table()) in text
    assert "\n".join(tables.fio_table()) in text
