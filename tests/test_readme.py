# SPDX-License-Identifier: Apache-2.0
"""The README's performance tables are those of bench/results."""

import pathlib

import tables

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"


def test_performance_tables_come_from_the_results():
    text = README.read_text("utf-8")
    for table in tables.TABLES:
        assert "\n".join(table()) in text, table.__name__
