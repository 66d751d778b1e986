"""A configuration as the installed TRL understands it: its settings, types and defaults are read from its dataclasses.

Source: ``trl/scripts/<trainer>.py``, whose ``make_parser`` names the dataclasses of a ``trl`` command.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import enum
import importlib
import importlib.util
import pkgutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from driftscope.doctor.config_fields import KnownField, fields_of
from driftscope.doctor.config_file import check, option_names, read_file, split_command
from driftscope.doctor.facts import Settings
from driftscope.errors import UsageError
from driftscope.hooks.doctor.isolation import isolated
from driftscope.hooks.sampler import ENGINE_MODULES

PREFERRED = ("grpo", "reward", "sft")
# Settings that ask for hardware, files or services: they are kept as given and TRL's class is tried without them.
ELSEWHERE = (
    "output_dir", "logging_dir", "use_cpu", "no_cuda", "report_to", "deepspeed", "fsdp", "fsdp_config", "tf32",
    "parallelism_config", "torch_compile", "torch_compile_backend", "torch_compile_mode", "local_rank", "push_to_hub",
    "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params", "tpu_num_cores", "use_ipex", "use_mps_device",
)  # fmt: skip
RAW_LOGPROBS = "raw_logprobs"  # vLLM's own default


def load_settings(path: Path | None = None, arguments: Sequence[str] = (), trainer: str | None = None) -> Settings:
    """The settings of TRL's YAML file and ``trl`` arguments, the defaults of the installed TRL filled in.

    path: the file of ``--config``. arguments: ``["trl", "grpo", "--top_p", "0.8"]``, with or without the command; they
    override the file. trainer: ``grpo``, ``reward`` ...; by default the command's, else the one whose settings these
    are, else ``grpo``. ``refusal`` holds what TRL's own classes raise for these values.
    Raises ``UsageError`` for a file that cannot be read, an unknown name, a wrong type and where TRL is not installed.
    """
    known = commands()
    line = split_command(arguments, known)
    file_path = path or line.config
    file = read_file(file_path) if file_path is not None else {}
    launch = launch_options()
    kind = trainer or line.trainer
    if kind is None:
        kind = _recognise({*file, *option_names(line.options)}, known, launch)
    elif kind not in known:
        raise UsageError(f"trainer={kind!r}: the installed TRL trains {', '.join(sorted(known))}.")
    classes = dataclasses_of(kind)
    fields = fields_of(*classes)
    given = check(file, line, fields, launch, source=f"--config {file_path}")
    processes, told = _processes(given.launch)
    values, refusal = _resolve(classes, fields, given.values, processes)
    if refusal is not None and not told:
        refusal += _with_more_processes(classes, fields, given.values, processes)
    parts = [str(file_path)] if file_path is not None else []
    parts += ["command line"] if line.options or line.launch else []
    return Settings(
        trainer=kind,
        values=values,
        given=frozenset(given.values),
        source=" and ".join(parts) or f"defaults of trl {kind}",
        refusal=refusal,
        processes=processes,
        logprobs_mode=logprobs_mode(),
    )


def settings_of(trainer: Any) -> Settings:
    """The settings of a live trainer, from its ``args`` and its model; the trainer stays as it is.

    ``given`` holds what differs from what the installed classes would fill in.
    """
    args = trainer.args
    values = {f.name: _plain(getattr(args, f.name, None)) for f in dataclasses.fields(args)}
    given = _set_by_hand(type(args), values)
    model = getattr(trainer, "model", None)
    config = getattr(model, "config", None)
    base = next(iter(model.parameters()), None) if model is not None else None
    values |= {
        "model_name_or_path": getattr(config, "_name_or_path", None) or None,
        "use_peft": hasattr(model, "peft_config"),
        "dtype": str(getattr(config, "dtype", None) or getattr(base, "dtype", "")).removeprefix("torch."),
    }
    return Settings(
        trainer=_kind(type(trainer)),
        values=values,
        given=frozenset(given),
        source=type(trainer).__name__,
        processes=int(trainer.accelerator.num_processes),
        logprobs_mode=logprobs_mode(),
    )


def _kind(cls: type) -> str:
    """``grpo`` for GRPOTrainer and its subclasses, ``reward`` for RewardTrainer; else the class's own short name."""
    for base in cls.__mro__:
        if base.__module__.startswith("trl.") and base.__name__.endswith("Trainer"):
            return base.__name__.removesuffix("Trainer").lower().lstrip("_")
    return cls.__name__.removesuffix("Trainer").lower()


def commands() -> tuple[str, ...]:
    """The trainers that the installed TRL's command line has. Raises ``UsageError`` without TRL."""
    try:
        found = importlib.util.find_spec("trl.scripts")
    except ModuleNotFoundError:
        found = None
    if found is None or found.submodule_search_locations is None:
        raise UsageError(
            "TRL is not installed here, and the settings of a run are read from its own classes: pip install trl "
            'in the environment that trains, or pip install "driftscope[trl]".'
        )
    names = []
    for module in pkgutil.iter_modules(found.submodule_search_locations):
        text = (Path(found.submodule_search_locations[0]) / f"{module.name}.py").read_text(encoding="utf-8")
        if "def make_parser" in text and "ModelConfig" in text:
            names.append(module.name)
    return tuple(names)


def dataclasses_of(kind: str) -> tuple[type, ...]:
    """The dataclasses of ``trl <kind>``: script arguments, trainer configuration, model, datasets."""
    with isolated():  # importing a script sets environment variables
        parser = importlib.import_module(f"trl.scripts.{kind}").make_parser()
    return tuple(parser.dataclass_types)


def launch_options() -> dict[str, bool]:
    """Options of ``accelerate launch`` -> whether they take a value."""
    with isolated():
        from accelerate.commands.launch import launch_command_parser

        actions = launch_command_parser()._actions
    return {
        option[2:].replace("-", "_"): action.nargs != 0
        for action in actions
        for option in action.option_strings
        if option.startswith("--")
    }


def logprobs_mode() -> str | None:
    """The ``logprobs_mode`` that the installed TRL gives vLLM's constructor, read in its source."""
    for name in ENGINE_MODULES:
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            continue
        if spec is None or spec.origin is None:
            continue
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _builds(node)]
        for call in calls:
            for keyword in call.keywords:
                if keyword.arg == "logprobs_mode" and isinstance(keyword.value, ast.Constant):
                    return str(keyword.value.value)
        if calls:
            return RAW_LOGPROBS
    return None


def _builds(call: ast.Call) -> bool:
    """Whether a call in the syntax tree makes vLLM's ``LLM``."""
    return isinstance(call.func, ast.Name) and call.func.id == "LLM"


def _recognise(names: Collection[str], known: Iterable[str], launch: Mapping[str, bool]) -> str:
    """The trainer whose settings these are: the first that has them all, else the one that lacks the fewest."""
    lacking: dict[str, int] = {}
    for kind in sorted(known, key=lambda name: (PREFERRED.index(name) if name in PREFERRED else len(PREFERRED), name)):
        fields = fields_of(*dataclasses_of(kind))
        settings = {name if name in fields else name.removeprefix("no_") for name in names}
        lacking[kind] = len(settings - fields.keys() - launch.keys() - {"accelerate_config"})
        if not lacking[kind]:
            return kind
    return min(lacking, key=lambda kind: lacking[kind])


def _processes(launch: Mapping[str, Any]) -> tuple[int, bool]:
    """The number of processes, and whether the launch options tell it."""
    import torch
    import yaml  # type: ignore[import-untyped]

    number: Any = launch.get("num_processes")
    named = launch.get("accelerate_config") or launch.get("config_file")
    if number is None and named:
        shipped = importlib.util.find_spec("trl.accelerate_configs")
        folders = list(shipped.submodule_search_locations or ()) if shipped is not None else []
        for file in (Path(str(named)), *(Path(folder) / f"{named}.yaml" for folder in folders)):
            if file.is_file():
                loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
                number = loaded.get("num_processes") if isinstance(loaded, dict) else None
                break
        else:
            raise UsageError(f"accelerate_config={named!r} is neither a file nor a configuration that TRL ships.")
    if number is None:
        return max(1, torch.cuda.device_count()), False
    try:
        return max(1, int(number)), True
    except (TypeError, ValueError):
        raise UsageError(f"num_processes={number!r}: accelerate launch takes a whole number.") from None


def _resolve(
    classes: Sequence[type], fields: Mapping[str, KnownField], given: Mapping[str, Any], processes: int
) -> tuple[dict[str, Any], str | None]:
    """All settings as TRL's classes resolve them, and what they raise."""
    values = {name: copy.deepcopy(field.default) for name, field in fields.items()} | dict(given)
    with isolated(keep_accelerate=False):
        for cls in classes:
            own = {f.name for f in dataclasses.fields(cls) if f.init}
            try:
                made = _instance(cls, {name: v for name, v in given.items() if name in own}, processes)
            except Exception as error:  # noqa: BLE001 - whatever TRL refuses these values with
                return {name: _plain(value) for name, value in values.items()}, f"{type(error).__name__}: {error}"
            values |= {name: getattr(made, name) for name in own if name not in ELSEWHERE and hasattr(made, name)}
    return {name: _plain(value) for name, value in values.items()}, None


def _instance(cls: type, given: Mapping[str, Any], processes: int) -> Any:
    """An instance of one of TRL's dataclasses, without touching a device, a directory or a service."""
    chosen = {name: copy.deepcopy(value) for name, value in given.items() if name not in ELSEWHERE}
    if not hasattr(cls, "world_size"):  # script arguments, model, datasets
        return cls(**chosen)
    # The class's own checks divide by the number of processes.
    alike = type(cls.__name__, (cls,), {"world_size": property(lambda _: processes)})
    return alike(output_dir="driftscope-doctor", use_cpu=True, report_to=[], **chosen)


def _with_more_processes(
    classes: Sequence[type], fields: Mapping[str, KnownField], given: Mapping[str, Any], processes: int
) -> str:
    """What to add to a refusal that another number of processes would avoid."""
    for number in (2, 4, 8, 16, 3, 5, 6, 7):
        if number != processes and _resolve(classes, fields, given, number)[1] is None:
            one = "1 process" if processes == 1 else f"{processes} processes"
            return (
                f" (Tried with {one}, as on this machine; TRL accepts it with {number}: give --num_processes "
                f"{number} if that is how the run is launched.)"
            )
    return ""


def _set_by_hand(cls: type, values: Mapping[str, Any]) -> set[str]:
    """The names whose value is neither the default nor what the class makes of the other values."""
    defaults = {name: _plain(field.default) for name, field in fields_of(cls).items()}
    differs = {name for name, default in defaults.items() if values.get(name) != default}
    with isolated(keep_accelerate=False):
        try:
            plain = _instance(cls, {}, 1)
            differs = {name for name in differs if _plain(getattr(plain, name, None)) != values[name]}
            unset = {name for name in differs if defaults[name] is None}
            made = _instance(cls, {name: values[name] for name in differs - unset}, 1)
        except Exception:  # noqa: BLE001 - a class of the user's own
            return differs
    return differs - {name for name in unset if _plain(getattr(made, name, None)) == values[name]}


def _plain(value: Any) -> Any:
    """Enumerations by their value."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
