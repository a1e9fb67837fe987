# SPDX-License-Identifier: Apache-2.0
"""The error of this package."""


class PatchError(Exception):
    """A patch file is damaged, or a tree cannot be changed; the message says what was found and what to do."""
