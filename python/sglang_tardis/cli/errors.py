# SPDX-License-Identifier: Apache-2.0
"""Exit statuses of `tardis`, and the error that ends a command with one line."""

EXIT_OK = 0
EXIT_PROBLEMS = 1
EXIT_ERROR = 2


class CommandError(Exception):
    """The command cannot go on; the message says why and what to do."""
