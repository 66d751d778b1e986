"""Which options the installed TRL refuses together with its fused loss, read from its own source.

A refusal is a ``raise`` under a condition on ``use_liger_kernel``; options that raise an error are not silent, so they
are listed apart from the findings.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import lru_cache
from typing import Any, get_args

from driftscope.kernels import liger
from driftscope.spec import LossSpec, LossType

OPTIONS: dict[str, Callable[[LossSpec], bool]] = {
    "off_policy_mask_threshold": lambda spec: spec.off_policy_threshold is not None,
    "top_entropy_quantile": lambda spec: spec.top_entropy_quantile < 1.0,
    "importance_sampling_level": lambda spec: spec.importance_sampling_level != "token",
    "delta": lambda spec: spec.delta is not None,
}


def refused_options(trainer: Any) -> list[dict[str, str]]:
    """Options refused with an error next to ``use_liger_kernel``: option, where, message."""
    classes: tuple[type, type] = (type(trainer), type(trainer.args))
    return [dict(row) for row in _refused_by(*classes)] + _refused_by_liger(type(trainer))


@lru_cache(maxsize=8)
def _refused_by(trainer_class: type, args_class: type) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    for cls, method in ((trainer_class, "__init__"), (args_class, "__post_init__")):
        for owner in cls.__mro__:
            if method in vars(owner) and owner.__module__.startswith("trl"):
                found += _refusals(owner, method)
    return found


def _refused_by_liger(trainer_class: type) -> list[dict[str, str]]:
    """Loss types that TRL's own path has and Liger's loss refuses when the training starts."""
    if not hasattr(trainer_class, "compute_liger_loss"):
        return []
    try:
        source = inspect.getsource(trainer_class._compute_loss)  # type: ignore[attr-defined]
        refused = liger.refused_loss_types(t for t in get_args(LossType) if f'"{t}"' in source)
    except (ImportError, OSError, TypeError):
        return []
    return [
        {"option": f"loss_type={name!r}", "where": "Liger's loss", "message": why} for name, why in refused.items()
    ]


def refusal(trainer: Any, spec: LossSpec) -> str | None:
    """Why TRL would refuse this configuration on its fused path, or ``None``."""
    classes: tuple[type, type] = (type(trainer), type(trainer.args))
    for row in _refused_by(*classes):
        if OPTIONS[row["option"]](spec):
            return f"TRL refuses {row['option']} together with use_liger_kernel: {row['message']}"
    return None


def _refusals(owner: type, method: str) -> list[dict[str, str]]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(vars(owner)[method])))
    except (OSError, TypeError, SyntaxError):
        return []
    rows = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.If) or "use_liger_kernel" not in ast.unparse(node.test):
            continue
        raised = [n for n in node.body if isinstance(n, ast.Raise)]
        names = {n.attr for n in ast.walk(node.test) if isinstance(n, ast.Attribute)} - {"use_liger_kernel"}
        for statement in raised:
            row = {"where": f"{owner.__name__}.{method}", "message": _message(statement)}
            rows += [{"option": option, **row} for option in sorted(names & OPTIONS.keys())]
    return rows


def _message(statement: ast.Raise) -> str:
    texts = [n.value for n in ast.walk(statement) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return " ".join("".join(texts).split())
