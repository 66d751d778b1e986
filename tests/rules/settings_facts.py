"""Facts of a configuration, for the rules on them."""

from __future__ import annotations

from typing import Any

from driftscope.doctor import Facts, ModelFacts, Settings
from driftscope.rules.base import Thresholds
from driftscope.rules.registry import registry


def configured(trainer: str = "grpo", model: dict[str, Any] | None = None, **values: Any) -> Facts:
    """Facts of a run with these settings; model: fields of ModelFacts."""
    told = {name: values.pop(name) for name in ("refusal", "logprobs_mode") if name in values}
    settings = Settings(trainer=trainer, values=values, given=frozenset(values), **told)
    return Facts(settings=settings, model=ModelFacts(**model) if model is not None else None)


def predicted(code: str, facts: Facts, **limits: float) -> Any:
    """What the rule of this code foresees, or ``None``."""
    rule = next(rule for rule in registry() if rule.code == code)
    assert rule.predict is not None
    return rule.predict(facts, Thresholds(**limits))
