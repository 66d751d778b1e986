"""``driftscope.diagnose``: measure what can be measured before a run, and judge it by the rules."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from driftscope.doctor.facts import Facts, GradientFlow, ModelFacts, RewardFacts, Settings, StackTable
from driftscope.doctor.foresee import Diagnosis, chosen_rules, foresee
from driftscope.errors import UsageError
from driftscope.rules.base import Thresholds

T = TypeVar("T")


class _Measured:
    """Facts as they come in; what fails is unavailable, with the reason."""

    def __init__(self) -> None:
        self.unavailable: dict[str, str] = {}

    def take(self, name: str, measure: Callable[[], T]) -> T | None:
        """The fact, or ``None`` with its reason on record."""
        try:
            return measure()
        except Exception as error:  # noqa: BLE001 - one fact that cannot be had does not hide the others
            self.unavailable[name] = f"{type(error).__name__}: {error}"
            return None


def diagnose(
    subject: Any,
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    stack: bool = True,
    peft_config: Any = None,
    thresholds: Thresholds | None = None,
) -> Diagnosis:
    """What will go wrong with this trainer or model, measured on it before the run; worst first.

    subject: a TRL trainer (GRPOTrainer, RewardTrainer, or another Trainer) or a model. select, ignore: rule codes or
    groups (``DS301``, ``DS3``). stack: also run TRL's and Liger's loss code on a small synthetic batch; a few seconds.
    peft_config: with a reward model, the adapter that it is about to get; it is put on a copy, and what PEFT refuses
    is a finding.
    The trainer, its model and the random state stay as they are. Returns a sequence of findings (rule, severity,
    title, evidence, remedy) whose ``facts`` hold everything that was measured, and what could not be.
    Raises UsageError for an unknown rule code and for a subject that is neither trainer nor model.
    """
    rules = chosen_rules(select, ignore)
    if isinstance(subject, nn.Module):
        facts = _of_model(subject, peft_config)
    elif peft_config is not None:
        raise UsageError("peft_config goes with a model; a trainer has its adapter already. Leave it out.")
    elif isinstance(getattr(subject, "model", None), nn.Module) and hasattr(subject, "args"):
        facts = _of_trainer(subject, stack=stack)
    else:
        raise UsageError(
            f"{type(subject).__name__} is neither a trainer nor a model: diagnose measures on a TRL trainer (with its "
            "model and args) or on a torch module. Give it the trainer, after its construction and before train()."
        )
    return foresee(facts, thresholds, rules)


def diagnose_config(
    settings: Settings,
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    stack: bool = True,
    model: str | None = None,
    thresholds: Thresholds | None = None,
) -> Diagnosis:
    """As ``diagnose``, for a configuration: on a trainer that is built from it around a shrunk random model.

    model: local directory of the model, in place of the configuration's model_name_or_path.
    """
    rules = chosen_rules(select, ignore)
    if model is not None:
        settings = dataclasses.replace(settings, values={**settings.values, "model_name_or_path": model})
    named = settings.get("model_name_or_path")
    measured = _Measured()
    table = None
    if stack and settings.trainer == "grpo":
        config = measured.take("model", lambda: _model_config(str(named))) if named else None
        table = measured.take("stack", lambda: _stack(settings, None, config))
    facts = Facts(settings=settings, stack=table)
    if settings.refusal is None and named and "model" not in measured.unavailable:
        twin = measured.take("model", lambda: _of_twin(settings))
        if twin is not None:
            measured.unavailable.update(twin.unavailable)
            facts = dataclasses.replace(facts, flow=twin.flow, reward=twin.reward, model=twin.model)
    elif "model" not in measured.unavailable:
        why = "TRL refuses the configuration" if settings.refusal else "no model is named (--model DIR)"
        measured.unavailable["model"] = f"gradient flow and head were not measured: {why}"
    return foresee(dataclasses.replace(facts, unavailable=measured.unavailable), thresholds, rules)


def _of_trainer(trainer: Any, *, stack: bool) -> Facts:
    from driftscope.hooks.doctor.settings import settings_of

    measured = _Measured()
    settings = measured.take("settings", lambda: settings_of(trainer))
    grpo = settings is not None and settings.trainer == "grpo"
    table = measured.take("stack", lambda: _stack(settings, trainer)) if stack and grpo else None
    reward, flow = _learning(trainer, settings, measured)
    model = measured.take("model", lambda: _model(trainer, settings)) if settings is not None else None
    if model is not None:
        measured.unavailable.update({f"model.{name}": why for name, why in model.unavailable.items()})
    return Facts(
        settings=settings, stack=table, flow=flow, reward=reward, model=model, unavailable=measured.unavailable
    )


def _of_model(model: nn.Module, peft_config: Any) -> Facts:
    measured = _Measured()
    if _scores_sequences(model):
        reward = measured.take("reward", lambda: _reward(model, peft_config))
        return Facts(reward=reward, flow=reward.flow if reward else None, unavailable=measured.unavailable)
    if peft_config is not None:
        raise UsageError(
            f"peft_config: {type(model).__name__} is no reward model; put the adapter on it with get_peft_model and "
            "diagnose the result."
        )
    return Facts(flow=measured.take("flow", lambda: _flow(model)), unavailable=measured.unavailable)


def _of_twin(settings: Settings) -> Facts:
    from driftscope.hooks.doctor.model_facts import copy_facts
    from driftscope.hooks.doctor.twin import build_twin

    measured = _Measured()
    with tempfile.TemporaryDirectory() as directory, build_twin(settings, Path(directory)) as trainer:
        reward, flow = _learning(trainer, settings, measured)
        # The copy's weights are random: what depends on their values would say nothing about the user's model.
        facts = copy_facts(trainer)
        if reward is not None:
            reward = dataclasses.replace(reward, head_random=None)
    return Facts(flow=flow, reward=reward, model=facts, unavailable=measured.unavailable)


def _learning(
    trainer: Any, settings: Settings | None, measured: _Measured
) -> tuple[RewardFacts | None, GradientFlow | None]:
    """Does the gradient arrive: as a reward model where the trainer trains one, else through the policy."""
    why = _not_whole(trainer)
    if why is not None:
        measured.unavailable["flow"] = why
        return None, None
    if settings is not None and settings.trainer == "reward":
        reward = measured.take("reward", lambda: _reward(trainer))
        return reward, reward.flow if reward is not None else None
    return None, measured.take("flow", lambda: _flow(trainer))


def _not_whole(trainer: Any) -> str | None:
    """Why a backward cannot be tried in this process alone, or ``None``."""
    for flag, name in (("is_deepspeed_enabled", "DeepSpeed"), ("is_fsdp_enabled", "FSDP")):
        if getattr(trainer, flag, False):
            return f"{name} shards the model: a backward in one process would wait for the others"
    return None


def _scores_sequences(model: nn.Module) -> bool:
    """Whether a model answers one row of logits per sequence, adapters aside."""
    get_base: Any = getattr(model, "get_base_model", None)
    inner = get_base() if get_base is not None else model
    return "ForSequenceClassification" in type(inner).__name__


def _stack(settings: Settings | None, trainer: Any, model_config: Any = None) -> StackTable:
    from driftscope.hooks.doctor.stack import probe_stack

    return probe_stack(settings, trainer=trainer, model_config=model_config)


def _model_config(path: str) -> Any:
    from driftscope.hooks.doctor.shrink import local_config

    return local_config(path)


def _reward(subject: Any, peft_config: Any = None) -> RewardFacts:
    from driftscope.hooks.doctor.reward_facts import reward_facts

    return reward_facts(subject, peft_config=peft_config)


def _flow(subject: Any) -> GradientFlow:
    """The trainer where there is one: its arguments decide about checkpointing, and it applies them late."""
    from driftscope.hooks.doctor.flow import gradient_flow

    return gradient_flow(subject)


def _model(trainer: Any, settings: Settings) -> ModelFacts:
    from driftscope.hooks.doctor.model_facts import model_facts

    return model_facts(trainer, settings)
