"""A smaller workspace for the head pass, for a device whose memory has run out."""

from __future__ import annotations

import dataclasses
from typing import Any

from driftscope.spectrum import tile_rows

LEAST_ROWS = 8
"""Tokens of a logits tile below which a smaller one frees nothing that matters."""


def halve(heads: Any) -> bool:
    """Halve the ``workspace_bytes`` that the head pass works with from now on; ``False`` where that is too little.

    heads: ``hooks.headpass.Heads``. The user's own setting stays as it is, and so does the loss that trains.
    """
    vocabulary = heads.inner.get_output_embeddings().weight.shape[0]
    smaller = heads.config.workspace_bytes // 2
    if tile_rows(vocabulary, smaller) < LEAST_ROWS:
        return False
    heads.config = dataclasses.replace(heads.config, workspace_bytes=smaller)
    return True
