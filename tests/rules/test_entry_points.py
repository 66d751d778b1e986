"""Rules of other packages: a real distribution on the path, seen by the registry and the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE = """
from driftscope.rules import Finding, Rule

def predict(facts, thresholds):
    if facts.settings is None or facts.settings.get("learning_rate", 0) < 1:
        return None
    return Finding("warning", RULE.title, f"learning_rate={facts.settings.get('learning_rate')}", RULE.remedy)

RULE = Rule(code=CODE, name="huge-learning-rate", title="Huge learning rate", group="acme", why="It diverges. Always.",
            condition="learning_rate >= 1.", remedy="Set learning_rate=1e-6.", source="doctor", predict=predict)
not_a_rule = 3
"""


def installed(directory: Path, code: str, target: str = "acme_rules:RULE") -> dict[str, str]:
    """An environment with a distribution that registers a rule."""
    (directory / "acme_rules.py").write_text(MODULE.replace("code=CODE", f"code={code!r}"), encoding="utf-8")
    info = directory / "acme_rules-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-rules\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[driftscope.rules]\nacme = {target}\n", encoding="utf-8")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)])}


def run(env: dict[str, str], code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT, check=False)


def test_a_registered_rule_judges_and_explains_itself(tmp_path: Path):
    env = installed(tmp_path, "ACME001")
    done = run(
        env,
        "from driftscope.doctor import Facts, Settings, foresee\n"
        "for rate in (2.0, 1e-6):\n"
        "    print([f.rule for f in foresee(Facts(settings=Settings(values={'learning_rate': rate})))])\n"
        "from driftscope.cli import main\n"
        "raise SystemExit(main(['doctor', '--explain', 'ACME001']))\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['ACME001']\n[]\n# ACME001: Huge learning rate")


@pytest.mark.parametrize(
    ("code", "target", "why"),
    [
        ("DS101", "acme_rules:RULE", "DS101 is in use"),
        ("nonsense", "acme_rules:RULE", "not of the form"),
        ("ACME001", "acme_rules:not_a_rule", "it is a int"),
        ("ACME001", "acme_rules:absent", "AttributeError"),
        ("ACME001", "no_such_module:RULE", "ModuleNotFoundError"),
    ],
)
def test_an_unusable_rule_is_left_out_with_a_warning(tmp_path: Path, code: str, target: str, why: str):
    done = run(installed(tmp_path, code, target), "from driftscope.rules import registry; print(len(registry()))")
    from driftscope.rules import registry

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(registry())
    assert why in done.stderr
    assert "'acme'" in done.stderr


def test_the_registry_finds_every_rule_file() -> None:
    from driftscope.rules import registry

    files: list[Any] = sorted((ROOT / "driftscope" / "rules").glob("ds[0-9]*.py"))
    assert [r.code.lower() for r in registry() if r.code.startswith("DS")] == [f.name[:5] for f in files]
