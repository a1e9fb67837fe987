# SPDX-License-Identifier: Apache-2.0
"""The doors into SGLang: everything here runs inside SGLang's processes and may import it."""
