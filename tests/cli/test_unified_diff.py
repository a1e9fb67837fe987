# SPDX-License-Identifier: Apache-2.0
"""Reading and applying unified diffs: exactly, or not at all."""

from __future__ import annotations

import difflib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_tardis.patching import PatchError
from sglang_tardis.patching.unified_diff import apply_hunks, parse


def test_hunks_fit_exactly_or_not_at_all():
    (diff,) = parse(b"--- a/sglang/x\n+++ b/sglang/x\n@@ -2,3 +2,4 @@\n b\n-c\n+C\n+D\n d\n")
    text = b"a\nb\nc\nd\ne"
    assert apply_hunks(text, diff.hunks) == b"a\nb\nC\nD\nd\ne"
    assert apply_hunks(b"a\nb\nC\nD\nd\ne", diff.hunks, reverse=True) == text
    for other in (
        b"\n" + text,
        text[2:],
        b"a\nb\nc\nx\ne",
        b"a\nb \nc\nd\ne",
        b"a\nb\nc\n",
        b"a\r\nb\r\nc\r\nd\r\ne",
        b"",
    ):
        with pytest.raises(PatchError, match="line 2"):
            apply_hunks(other, diff.hunks)
    hunk = b"@@ -2 +2 @@\n-b\n+B\n"
    (diff,) = parse(b"--- a/sglang/x\n+++ b/sglang/x\n" + 2 * hunk)
    with pytest.raises(PatchError, match="line 2"):  # a line that is replaced twice
        apply_hunks(text, diff.hunks)
    (diff,) = parse(b"--- a/s/x\n+++ b/s/x\n@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+a\n")
    assert apply_hunks(b"a", diff.hunks) == b"a\n" and apply_hunks(b"a\n", diff.hunks, reverse=True) == b"a"
    with pytest.raises(PatchError):
        apply_hunks(b"a\n", diff.hunks)


LINES = st.lists(st.sampled_from(["", "a", "b", "-x", "+y", "--- z", "@@ -1 +1 @@", "\\ w", " "]), max_size=30)


@settings(max_examples=300, deadline=None)
@given(LINES, LINES, st.integers(0, 4))
def test_diffs_of_random_texts(old, new, context):
    """Whatever difflib says the difference is, applying it gives the new text, and the way back the old one."""
    before, after = ("".join(line + "\n" for line in lines) for lines in (old, new))
    names = ("a/sglang/x", "b/sglang/x")
    diff = difflib.unified_diff(before.splitlines(True), after.splitlines(True), *names, n=context)
    text = re.sub(r"^(--- a/\S+|\+\+\+ b/\S+)\t?$", r"\1", "".join(diff), count=2, flags=re.MULTILINE).encode()
    if before == after:
        with pytest.raises(PatchError):
            parse(text)
        return
    (file,) = parse(text)
    assert apply_hunks(before.encode(), file.hunks) == after.encode()
    assert apply_hunks(after.encode(), file.hunks, reverse=True) == before.encode()
