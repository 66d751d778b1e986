"""Which row of a sketch a parameter goes to: one row of ``size`` buckets a module, fewer where there are many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from driftscope.errors import UsageError

MAX_ROWS = 256
"""Modules that are told apart: a sketch of 4096 buckets a row then takes 8 MiB at most."""


@dataclass(frozen=True)
class SketchLayout:
    """The rows of a model's gradient sketches; sketches of equal layouts add up.

    size: buckets k of a row. rows: module names. row_of: parameter -> row. index_of: parameter -> its number, which
    its hash depends on. blocks: blocks of k coordinates in each row (within a block nothing collides). seed: of the
    hash.
    """

    size: int
    rows: tuple[str, ...]
    row_of: dict[str, int]
    index_of: dict[str, int]
    blocks: tuple[int, ...]
    seed: int = 0

    @classmethod
    def of(cls, numels: Mapping[str, int], size: int, *, max_rows: int = MAX_ROWS, seed: int = 0) -> SketchLayout:
        """Layout of parameters, name -> number of elements of the whole parameter, in the order of the model.

        A row is a module that holds parameters; with more than ``max_rows`` of them, the modules' parents. Raises
        ``UsageError``.
        """
        if max_rows < 1:
            raise UsageError(f"max_rows={max_rows!r}: a sketch has one row at least.")
        names = _groups(list(numels), max_rows)
        rows = tuple(dict.fromkeys(names.values()))
        places = {row: i for i, row in enumerate(rows)}
        blocks = [0] * len(rows)
        for name, numel in numels.items():
            blocks[places[names[name]]] += -(-numel // size)
        return cls(
            size=size,
            rows=rows,
            row_of={name: places[names[name]] for name in numels},
            index_of={name: i for i, name in enumerate(numels)},
            blocks=tuple(blocks),
            seed=seed,
        )

    def variance(self) -> tuple[float, ...]:
        """For each row, s in Var <Su, Sv> = s (|u|^2 |v|^2 + <u, v>^2), an upper bound.

        1/k for a row of many blocks, 0 for a row of one block: its norm is exact. In between (1 - 1/blocks)/k, since
        the pairs of coordinates within a block hold 1/blocks of all products at least.
        """
        return tuple((1.0 - 1.0 / max(b, 1)) / self.size for b in self.blocks)


def _groups(parameters: list[str], max_rows: int) -> dict[str, str]:
    """Parameter -> row name: its module, cut after the most components that leave ``max_rows`` names or fewer."""
    modules = {name: name.rpartition(".")[0].split(".") for name in parameters}
    for depth in range(max((len(parts) for parts in modules.values()), default=1), 0, -1):
        cut = {name: ".".join(parts[:depth]) for name, parts in modules.items()}
        if len(set(cut.values())) <= max_rows:
            return cut
    return dict.fromkeys(parameters, "all modules")
