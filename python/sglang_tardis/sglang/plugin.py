# SPDX-License-Identifier: Apache-2.0
"""Entry point ``tardis`` of the group ``sglang.srt.plugins``.

SGLang calls :func:`register` once in every process it starts, before it reads the command line. Nothing of SGLang is
changed on disk. A server that does not use tardis must not notice: this function never raises, and what it could not
do is reported only to those who ask for tardis (:func:`sglang_tardis.sglang.seams.require`) or for the list
(:func:`check_seams`, used by ``tardis doctor``).
"""

from __future__ import annotations

__all__ = ["check_seams", "register"]


def register() -> None:
    """Make ``--hicache-storage-backend tardis`` known in this process."""
    try:
        from sglang_tardis.sglang import seams

        seams.install()
    except Exception as error:  # SGLang would print a traceback to people who never asked for tardis
        from sglang_tardis.log import logger

        level = logger.error if _asked_for() else logger.debug
        level("The tardis plugin could not register itself: %s: %s", type(error).__name__, error)


def check_seams():
    """State of every place where tardis meets SGLang, in this process.

    Returns:
        list of :class:`sglang_tardis.sglang.seams.Seam` (name, ok, detail). Registers the hooks first if need be.
    """
    from sglang_tardis.sglang import seams

    return seams.check(register_first=True)


def _asked_for() -> bool:
    import sys

    return any(word == "tardis" or word.endswith("=tardis") for word in sys.argv)
