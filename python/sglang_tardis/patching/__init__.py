# SPDX-License-Identifier: Apache-2.0
"""Source patches for SGLang releases, for processes that its plugins do not reach (``docs/sglang-patch.md``).

Nothing here imports SGLang, and nothing runs another program: the files are recognised by their SHA-256, hunks must fit
exactly, and every result is compared with the hash that the patch file promises before a file is replaced.
"""

from .change import change
from .errors import PatchError
from .release import ReleasePatch, load_patches, patches_folder
from .tree import FileState, Tree, examine, find_package

__all__ = [
    "FileState",
    "PatchError",
    "ReleasePatch",
    "Tree",
    "change",
    "examine",
    "find_package",
    "load_patches",
    "patches_folder",
]
