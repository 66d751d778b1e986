"""The pages say what the code says: fields, commands, rules, links, snippets, and nothing of one machine."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import struct
import sys
from pathlib import Path

import click
import pytest

from driftscope import DriftscopeConfig, records
from driftscope.cli import EXIT_INTERRUPTED, commands
from driftscope.errors import EXIT_CLEAN, EXIT_FINDINGS, EXIT_USAGE
from driftscope.records import CauseId, PathName
from driftscope.rules.registry import registry
from driftscope.spec import DEFAULT_NORMALIZER

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECORDS = (ROOT / "docs" / "records.md").read_text(encoding="utf-8")
HOW = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

# The record models and the heading that describes each.
SECTIONS = {
    "StepRecord": "Step",
    "PathRecord": "Path",
    "PathCost": "Path cost",
    "Gap": "Gap",
    "Cause": "Cause",
    "Unexplained": "Unexplained",
    "IsRatio": "Importance sampling ratio",
    "RatioStats": "Ratio statistics",
    "CanaryRecord": "Canary",
    "DriftRecord": "Drift",
    "ViolationRecord": "Violation",
    "GradientRecord": "Gradient",
    "Estimate": "Estimate",
    "ModuleGradient": "Module gradient",
    "BiasRecord": "Bias",
    "RanksRecord": "Ranks",
    "RankRow": "Rank row",
    "CadenceRecord": "Cadence",
    "CoefPoint": "Coefficient point",
    "AlertRecord": "Alert",
    "NoteRecord": "Note",
    "RunInfo": "Run",
}


def section(page: str, heading: str) -> str:
    """The text under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, f"no heading {heading!r}"
    return found.group(1)


def documented_fields(heading: str) -> list[str]:
    return re.findall(r"^\| `(\w+)` \|", section(RECORDS, heading), re.MULTILINE)


def test_every_record_model_has_a_section():
    models = {
        name
        for name, model in vars(records).items()
        if inspect.isclass(model) and hasattr(model, "model_fields") and model.__module__ == records.__name__
    }
    assert {name for name in models if not name.startswith("_") and name != "BaseModel"} == set(SECTIONS)


@pytest.mark.parametrize("name", SECTIONS)
def test_the_fields_of_a_record_are_those_of_the_page(name):
    fields = getattr(records, name).model_fields
    assert documented_fields(SECTIONS[name]) == [field.alias or key for key, field in fields.items()]


def test_the_names_of_causes_and_paths_are_on_the_page():
    for name in (*CauseId.__args__, *PathName.__args__):
        assert f"`{name}`" in RECORDS


def test_the_readme_names_the_commands_and_their_options():
    text = section(README, "Command line")
    for name, command in commands.commands.items():
        (line,) = re.findall(rf"^ +driftscope {name}\b(.*)$", text, re.MULTILINE)
        options = {o.opts[0] for o in command.params if isinstance(o, click.Option)}
        assert set(re.findall(r"--[a-z-]+", line)) == options, name
    assert set(re.findall(r"^ +driftscope (\w+)", text, re.MULTILINE)) == set(commands.commands)
    for target in ("make demo", "make test"):
        assert re.search(rf"^ +{target}\b", README, re.MULTILINE)


@pytest.mark.parametrize(
    "text", [section(README, "Command line"), section(RECORDS, "Exit codes of `driftscope check`")]
)
def test_the_exit_codes_are_those_of_the_code(text):
    documented = [int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]
    assert documented == [EXIT_CLEAN, EXIT_FINDINGS, EXIT_USAGE, EXIT_INTERRUPTED]


def test_the_readme_lists_every_rule():
    listed = re.findall(r"^\| \[(DS\d+)\]\(docs/rules/(DS\d+)\.md\) \|", README, re.MULTILINE)
    assert listed == [(rule.code, rule.code) for rule in registry()]


def test_the_cadence_of_the_readme_is_the_default():
    config = DriftscopeConfig()
    for name in ("spectrum_every", "deep_every"):
        assert f"`{name}={getattr(config, name)}`" in README
    assert f"warning from {config.gap_warning:g}x, critical from {config.gap_critical:g}x" in README


def test_every_normaliser_is_explained():
    for name in {*DEFAULT_NORMALIZER.values(), "generation_batch", "length_weighted"}:
        assert re.search(rf"^\| `{name}` \|", section(HOW, "Normaliser ledger"), re.MULTILINE), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    spec = importlib.util.spec_from_file_location("check_docs", ROOT / "scripts" / "check_docs.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    assert module.broken(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_snippets_compile_and_import_what_is_there(page):
    for snippet in SNIPPET.findall(page.read_text(encoding="utf-8")):
        tree = ast.parse(snippet, filename=str(page))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("driftscope"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, name.name) for name in node.names), snippet
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "driftscope":
                assert hasattr(importlib.import_module("driftscope"), node.attr), snippet


def test_the_readme_has_its_snippets():
    assert len(SNIPPET.findall(README)) == 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_no_machine(page):
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"(?<![\w./-])/(?:work|root|tmp|home|opt|mnt)\b[^\s)]*", text)
    assert "TODO" not in text.replace("OVERHEAD_TODO", "")


def test_the_screenshot_is_a_png_of_a_readable_size():
    data = (ROOT / "docs" / "images" / "report.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert 900 <= width <= 1600
    assert height >= 600
    assert len(data) < 300_000
