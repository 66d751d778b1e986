"""Reading TRL's YAML and command line: plain Python on a small dataclass, and against the real TRL's parser."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from driftscope.doctor.config_fields import fields_of
from driftscope.doctor.config_file import check, read_file, split_command
from driftscope.errors import UsageError


@dataclass
class Script:
    learning_rate: float = 1e-6
    steps: int = 1
    top_p: float = 1.0
    min_p: float | None = None
    use_vllm: bool = False
    checkpointing: bool = True
    scale: str = "group"
    mode: Literal["a", "b"] = "a"
    modules: list[str] | None = None
    weights: list[float] | None = None
    kwargs: dict[str, Any] | str | None = None
    report_to: str | list[str] | None = None
    datasets: list[dict[str, Any]] = field(default_factory=list)


LAUNCH = {"num_processes": True, "multi_gpu": False}
COMMANDS = ("grpo", "reward")


def read(file: dict[str, Any] | None = None, *words: str) -> dict[str, Any]:
    line = split_command(words, COMMANDS)
    return dict(check(file or {}, line, fields_of(Script), LAUNCH).values)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"learning_rate": "1e-6"}, 1e-6),  # YAML 1.1 reads 1e-6 as text
        ({"learning_rate": 1}, 1.0),
        ({"steps": 3}, 3),
        ({"use_vllm": "yes"}, True),
        ({"min_p": None}, None),
        ({"scale": False}, False),
        ({"modules": "all-linear"}, "all-linear"),
        ({"modules": ["q", "v"]}, ["q", "v"]),
        ({"weights": [1, "2.5"]}, [1.0, 2.5]),
        ({"kwargs": {"a": 1}}, {"a": 1}),
        ({"kwargs": '{"a": 1}'}, {"a": 1}),
        ({"report_to": "none"}, "none"),
        ({"datasets": [{"path": "p"}]}, [{"path": "p"}]),
    ],
)
def test_values_of_a_file_get_the_types_that_trl_gives_them(given, made):
    value = next(iter(read(given).values()))
    assert value == made and type(value) is type(made)


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (["--top_p", "0.8"], {"top_p": 0.8}),
        (["--top-p=0.8"], {"top_p": 0.8}),
        (["--use_vllm"], {"use_vllm": True}),
        (["--use_vllm", "false"], {"use_vllm": False}),
        (["--no_checkpointing"], {"checkpointing": False}),
        (["--modules", "q", "v"], {"modules": ["q", "v"]}),
        (["--steps", "-1", "--min_p", "none"], {"steps": -1, "min_p": None}),
        (["trl", "grpo", "--num_processes", "8", "--steps", "2"], {"steps": 2}),
    ],
)
def test_options_are_read_as_the_command_line_does(words, made):
    assert read(None, *words) == made


def test_the_command_line_overrides_the_file():
    assert read({"top_p": 0.8, "steps": 2}, "--top_p", "0.9") == {"top_p": 0.9, "steps": 2}


@pytest.mark.parametrize(
    "words",
    [
        ["trl", "grpo", "--config", "run.yaml", "--steps", "2"],
        ["accelerate", "launch", "--num_processes", "2", "-m", "trl.scripts.grpo", "--config=run.yaml", "--steps=2"],
        ["accelerate", "launch", "--multi_gpu", "trl/scripts/grpo.py", "--steps", "2", "--config", "run.yaml"],
        ["grpo", "--config", "run.yaml", "--steps", "2"],
    ],
)
def test_a_command_is_taken_apart(words):
    line = split_command(words, COMMANDS)
    assert (line.trainer, line.config) == ("grpo", Path("run.yaml"))
    assert check({}, line, fields_of(Script), LAUNCH).values == {"steps": 2}


def test_options_of_the_launcher_are_kept_apart():
    line = split_command(["accelerate", "launch", "--num_processes", "2", "trl", "grpo", "--multi_gpu"], COMMANDS)
    assert check({}, line, fields_of(Script), LAUNCH).launch == {"num_processes": "2", "multi_gpu": True}


@pytest.mark.parametrize(
    ("file", "words", "said"),
    [
        ({"top_q": 0.8}, [], r"top_q is no setting of Script .* Did you mean top_p\?"),
        ({}, ["--top_q", "0.8"], r"--top_q .* Did you mean --top_p\?"),
        (
            {"zzzzzz": 1},
            [],
            r"zzzzzz is no setting of Script in the installed TRL, and no option of accelerate launch\.$",
        ),
        ({"learning_rate": "fast"}, [], r"learning_rate is 'fast' \(str\), but Script.learning_rate takes a number\."),
        ({"steps": 2.5}, [], "takes a whole number"),
        ({"steps": True}, [], r"steps is True \(bool\), .* takes a whole number"),
        ({"use_vllm": "maybe"}, [], "takes true or false"),
        ({"use_vllm": 1}, [], "takes true or false"),
        ({"mode": "c"}, [], "takes one of 'a', 'b'"),
        ({"top_p": [0.8]}, [], "takes a number"),
        ({"scale": {"a": 1}}, [], "takes text"),
        ({"weights": ["x"]}, [], r"takes a list \(each item a number\)"),
        ({"kwargs": [1]}, [], "takes text or a mapping"),
        ({}, ["--steps"], "--steps needs a value: a whole number"),
        ({}, ["--steps", "1", "2"], "'2' is left over"),
        ({}, ["grop", "--steps", "1"], r"'grop' is no trainer .* Did you mean grpo\?"),
        ({}, ["--config"], "--config names TRL's YAML file"),
    ],
)
def test_what_cannot_be_is_refused_with_name_and_remedy(file, words, said):
    with pytest.raises(UsageError, match=said):
        read(file, *words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1, 2\nb: 3\n", r"line 2, column 2: not valid YAML"),
        ("a: 1\n\tb: 2\n", r"line 2, column 1: not valid YAML"),
        ("- a\n- b\n", "the file is a list, TRL needs a mapping"),
        ("", "the file is empty"),
        ("just text\n", "the file is a str"),
        ("env: 3\n", "env is 3"),
    ],
)
def test_a_broken_file_is_told_with_its_place(tmp_path, text, said):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UsageError, match=said):
        read_file(tmp_path / "run.yaml")


def test_files_that_are_missing_no_text_or_a_directory(tmp_path):
    with pytest.raises(UsageError, match="there is no such file"):
        read_file(tmp_path / "none.yaml")
    (tmp_path / "weights.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UsageError, match="no UTF-8 text"):
        read_file(tmp_path / "weights.yaml")
    with pytest.raises(UsageError, match="cannot be read"):
        read_file(tmp_path)


def test_env_is_no_setting(tmp_path):
    (tmp_path / "run.yaml").write_text("env:\n  A: 1\ntop_p: 0.8\n")
    assert read_file(tmp_path / "run.yaml") == {"top_p": 0.8}
