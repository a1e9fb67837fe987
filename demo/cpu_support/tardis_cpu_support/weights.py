# SPDX-License-Identifier: Apache-2.0
"""Random weights whose logits tell inputs apart."""

from __future__ import annotations

import os
import zlib

import torch

SEED_ENV = "TARDIS_WEIGHTS_SEED"


def initialize_seeded_weights(model: torch.nn.Module, *_args, **_kwargs) -> None:
    """Fill `model` in place: vectors (norms) with 1, matrices with N(0, 1 / columns), which keeps activations near 1.

    Each tensor's generator is seeded by its name and ``TARDIS_WEIGHTS_SEED`` (default 0), so that two servers agree bit
    for bit. The arguments are those of SGLang's ``initialize_dummy_weights``.
    """
    seed = os.environ.get(SEED_ENV, "0")
    for name, parameter in model.state_dict().items():
        if not torch.is_floating_point(parameter):
            continue
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
            continue
        generator = torch.Generator(device=parameter.data.device)
        generator.manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
