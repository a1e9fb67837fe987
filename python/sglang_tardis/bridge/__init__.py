# SPDX-License-Identifier: Apache-2.0
"""From SGLang's radix tree to the store: page keys, namespaces and where a page's bytes lie. No I/O and no torch."""
