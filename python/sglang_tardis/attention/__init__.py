# SPDX-License-Identifier: Apache-2.0
"""Attention over KV that lies in host memory, and that memory."""
