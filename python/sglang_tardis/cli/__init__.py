# SPDX-License-Identifier: Apache-2.0
"""The `tardis` command line tool."""
