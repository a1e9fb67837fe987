# SPDX-License-Identifier: Apache-2.0
"""Hypothesis settings: no per-example deadline, since tests share a machine with builds."""

from hypothesis import settings

settings.register_profile("bridge", deadline=None, max_examples=60)
settings.load_profile("bridge")
