# SPDX-License-Identifier: Apache-2.0
"""`python -m sglang_tardis.cli`, the same as `tardis`."""

import sys

from .main import main

sys.exit(main())
