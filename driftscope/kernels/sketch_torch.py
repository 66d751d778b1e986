"""The count sketch's hash and its sums in plain PyTorch: for the CPU, for float64, and to read beside the kernel.

Coordinate i of a parameter lies in block b = i // k at place o = i % k. Each block draws from the hash an offset r_b
and a word stream; bucket and sign of the coordinate are

    j = o XOR r_b,    s = 1 - 2 (bit (j / 32) % 32 of word 32 (j / 1024) + j % 32 of the stream).

So a block of k coordinates fills the k buckets once each: no scatter, no atomics, and no collision within a block.
Coordinates of two blocks collide with probability 1/k, as in a count sketch (Charikar, Chen, Farach-Colton, 2002).
The mixer is MurmurHash3's 32-bit finaliser (A. Appleby, public domain). All 32-bit words are held in int64 here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
WORD = 32  # signs in a word of the stream; a row of that many words covers 1024 buckets
M1, M2 = 0x85EBCA6B, 0xC2B2AE35  # multipliers of MurmurHash3's finaliser
TILE_ELEMENTS = 1 << 20  # coordinates at a time: 40 bytes of workspace each


class Keys(NamedTuple):
    """Three 32-bit words that a parameter's hash depends on."""

    block: int
    offset: int
    stream: int


def mix(h: int) -> int:
    """MurmurHash3's finaliser of a 32-bit word."""
    h = ((h ^ (h >> 16)) * M1) & MASK
    h = ((h ^ (h >> 13)) * M2) & MASK
    return h ^ (h >> 16)


def keys_of(seed: int, index: int) -> Keys:
    """Keys of the ``index``-th parameter under a seed."""
    words = []
    h = mix((seed ^ 0x9E3779B9) & MASK) ^ mix((seed >> 32) & MASK)
    for salt in (0x243F6A88, 0x85A308D3, 0x13198A2E):
        h = mix((h + salt + index * 0x9E3779B1) & MASK)
        words.append(h)
    return Keys(*words)


def _mix(h: Tensor) -> Tensor:
    h = ((h ^ (h >> 16)) * M1) & MASK
    h = ((h ^ (h >> 13)) * M2) & MASK
    return h ^ (h >> 16)


def block_hash(blocks: Tensor, keys: Keys, k: int) -> tuple[Tensor, Tensor]:
    """Offsets r_b (n,) and sign words (n, 32 ceil(k / 1024)) of blocks (n,), all int64."""
    base = _mix((blocks ^ keys.block) & MASK)
    offsets = _mix(base ^ keys.offset) & (k - 1)
    step = _mix(base ^ keys.stream) | 1
    places = torch.arange(WORD * max(1, k // WORD**2), device=blocks.device)
    return offsets, _mix((base[:, None] + places * step[:, None]) & MASK)


def buckets_and_signs(coordinates: Tensor, keys: Keys, k: int) -> tuple[Tensor, Tensor]:
    """Bucket and sign (+1 or -1, int64) of single coordinates (n,); as a definition, not for speed."""
    offsets, words = block_hash(coordinates // k, keys, k)
    j = (coordinates % k) ^ offsets
    word = j // WORD**2 * WORD + j % WORD
    bits = (words.gather(1, word[:, None]).squeeze(1) >> (j // WORD % WORD)) & 1
    return j, 1 - 2 * bits


def flat_sketch(flat: Tensor, offset: int, keys: Keys, k: int) -> Tensor:
    """Sketch (k,), float64, of the coordinates offset .. offset + n of a parameter, given as ``flat`` (n,)."""
    out = torch.zeros(k, dtype=torch.float64, device=flat.device)
    if flat.numel() == 0:
        return out
    first, last = offset // k, (offset + flat.numel() - 1) // k
    rows = max(1, TILE_ELEMENTS // k)
    j = torch.arange(k, device=flat.device)
    bit = torch.arange(min(WORD, k // WORD), device=flat.device)[:, None]
    for start in range(first, last + 1, rows):
        stop = min(start + rows, last + 1)
        tile = _tile(flat, offset, start, stop, k)
        offsets, words = block_hash(torch.arange(start, stop, device=flat.device), keys, k)
        values = tile.gather(1, j ^ offsets[:, None]).to(torch.float64)
        negative = ((words.view(stop - start, -1, 1, WORD) >> bit) & 1).view(stop - start, k).to(torch.bool)
        out += torch.where(negative, -values, values).sum(0)
    return out


def _tile(flat: Tensor, offset: int, start: int, stop: int, k: int) -> Tensor:
    """Blocks start .. stop as (stop - start, k), zero where ``flat`` does not reach."""
    low, high = start * k - offset, stop * k - offset
    inside = flat[max(low, 0) : min(high, flat.numel())]
    if inside.numel() == high - low:
        return inside.view(stop - start, k)
    tile = torch.zeros((stop - start) * k, dtype=flat.dtype, device=flat.device)
    tile[max(-low, 0) : max(-low, 0) + inside.numel()] = inside
    return tile.view(stop - start, k)
