"""Build the wheel and try it outside the checkout: ``make wheel-test``.

1. sdist, and the wheel from that sdist, from a clean copy of the tree; it holds every file of the three folders and
   nothing else.
2. In a fresh environment with the *oldest* dependencies that pyproject.toml allows and no training stack at all: the
   command line runs, every module that needs no torch is imported, a run's report is rendered.
3. In the stack that runs this script, but from the wheel's files: every module is imported.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOMES = {"driftscope": "driftscope", "hooks": "driftscope/hooks", "dashboards": "driftscope/dashboards"}
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "runs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "*.whl"
)
STACK = {"torch", "trl", "transformers", "triton", "liger_kernel", "peft", "datasets", "accelerate", "vllm"}
# These serve people who read a run on a machine without the training stack.
NO_STACK = ("driftscope", "driftscope.cli", "driftscope.dashboards", "driftscope.journal", "driftscope.records",
            "driftscope.spec", "driftscope.verdict")  # fmt: skip

IMPORT_ALL = """
import importlib, json, sys
root = sys.argv[1]
sys.path.insert(0, root)
result = {"failed": {}, "stack": {}, "ok": []}
for name in sys.argv[2:]:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        result["stack"][name] = missing
    except Exception as error:
        result["failed"][name] = repr(error)
    else:
        if not (module.__file__ or "").startswith(root):
            result["failed"][name] = f"came from {module.__file__}, not from the wheel"
        result["ok"].append(name)
print(json.dumps(result))
"""

WRITE_RUN = """
import json, pathlib, sys
from driftscope.records import AlertRecord, Gap, PathRecord, RunInfo, StepRecord
run = pathlib.Path(sys.argv[1])
run.mkdir()
info = RunInfo(run_id="wheel", created=0.0, finished=1.0, status="finished", driftscope="0.1.0")
(run / "run.json").write_text(info.model_dump_json(by_alias=True))
steps = [
    StepRecord(
        step=n, micro_step=0, live="liger", residual=1e-7,
        paths={"liger": PathRecord(loss=0.1 * n, hidden_grad_norm=10.0), "reference": PathRecord(loss=0.1)},
        gap=Gap(candidate="liger", reference="reference", grad_norm_ratio=100.0, loss_diff=0.1, cosine=1.0),
    )
    for n in (1, 2, 3)
]
alert = AlertRecord(step=1, rule="DS101", severity="critical", title="gap", evidence="100x", remedy="none")
lines = [record.model_dump_json(by_alias=True) for record in (*steps, alert)]
(run / "records.jsonl").write_text("".join(line + "\\n" for line in lines))
"""


class WheelError(Exception):
    """The wheel is not what the checkout is."""


def run(*command: object, cwd: Path, expect: tuple[int, ...] = (0,)) -> str:
    """Output of a command; raises WheelError with all it said where its exit code is another than expected."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode not in expect:
        raise WheelError(f"{' '.join(map(str, command))[:200]}\nexit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(work: Path) -> Path:
    """The wheel, built from the sdist that is built from a clean copy of the tree."""
    copy = work / "tree"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=LEFT_OUT)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", work / "dist", copy, cwd=work)
    (wheel,) = (work / "dist").glob("*.whl")
    return wheel


def expected_files() -> set[str]:
    """Every file of the three folders, at the path where the wheel must hold it."""
    found = set()
    for folder, home in HOMES.items():
        for parent, folders, files in os.walk(ROOT / folder):  # does not follow the links
            folders[:] = [f for f in folders if f != "__pycache__"]
            inside = Path(parent).relative_to(ROOT / folder)
            found |= {(Path(home) / inside / file).as_posix() for file in files if not file.endswith(".pyc")}
    return found


def check_contents(wheel: Path) -> list[str]:
    """Compare the wheel with the checkout; returns the names of its modules."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = expected_files()
    if missing := sorted(wanted - held):
        raise WheelError(
            f"the wheel lacks {missing}; a new kind of data file belongs into package-data in pyproject.toml"
        )
    if surplus := sorted(held - wanted):
        raise WheelError(f"the wheel holds what the three folders do not: {surplus}")
    modules = [name.removesuffix(".py").replace("/", ".") for name in wanted if name.endswith(".py")]
    return sorted(m.removesuffix(".__init__") for m in modules if not m.endswith(".__main__"))


def oldest(work: Path) -> Path:
    """A constraints file that pins each hard dependency to its lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = [re.sub(r">=", "==", requirement) for requirement in project["dependencies"]]
    path = work / "oldest.txt"
    # The lower bounds have no wheels for the newest Pythons; there the newest releases are tried instead.
    path.write_text("\n".join(pins) if sys.version_info < (3, 13) else "", encoding="utf-8")
    return path


def serves_readers(module: str) -> bool:
    """True for a module that must be importable without the training stack."""
    return module == "driftscope" or any(f"{module}.".startswith(f"{name}.") for name in NO_STACK[1:])


def try_alone(wheel: Path, work: Path, modules: list[str]) -> str:
    """The wheel in an environment of its own, without torch; returns a sentence on what was tried."""
    venv, outside = work / "venv", work / "elsewhere"
    outside.mkdir()
    run(sys.executable, "-m", "venv", venv, cwd=work)
    python, command = venv / "bin" / "python", venv / "bin" / "driftscope"
    run(python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-c", oldest(work), wheel, cwd=outside)
    version = run(command, "--version", cwd=outside).strip()
    site = run(python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=outside).strip()
    result = json.loads(run(python, "-I", "-c", IMPORT_ALL, site, *modules, cwd=outside))
    wrong = {
        name: missing for name, missing in result["stack"].items() if missing not in STACK or serves_readers(name)
    }
    if result["failed"] or wrong:
        raise WheelError(f"without a training stack, modules fail to import: {result['failed']} {wrong}")
    if absent := sorted(set(NO_STACK) - set(result["ok"])):
        raise WheelError(f"modules that should be there are not: {absent}")
    run(python, "-I", "-c", WRITE_RUN, outside / "run", cwd=outside)
    run(command, "report", outside / "run", cwd=outside)
    html = (outside / "run" / "report.html").read_text(encoding="utf-8")
    if "</html>" not in html or len(html) < 100_000:
        raise WheelError(f"the report is not whole: {len(html)} characters")
    run(command, "check", outside / "run", "--fail-on", "critical", cwd=outside, expect=(1,))
    return f"{version}; {len(result['ok'])} modules without torch, {len(result['stack'])} more need the training stack"


def try_in_stack(wheel: Path, work: Path, modules: list[str]) -> str:
    """The wheel's files with this interpreter's training stack: every module is imported."""
    site = work / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    result = json.loads(run(sys.executable, "-I", "-c", IMPORT_ALL, site, *modules, cwd=work).splitlines()[-1])
    if result["failed"] or result["stack"]:
        raise WheelError(f"with the training stack, modules fail to import: {result['failed']} {result['stack']}")
    return f"{len(result['ok'])} modules with the training stack"


def main() -> int:
    """Run the three parts; exit code 1 and the reason on stderr where one fails."""
    with tempfile.TemporaryDirectory(prefix="driftscope-wheel-") as folder:
        work = Path(folder).resolve()
        try:
            wheel = build(work)
            modules = check_contents(wheel)
            print(f"wheel: {wheel.name} holds all {len(modules)} modules and every data file", flush=True)
            print(f"wheel: {try_alone(wheel, work, modules)}", flush=True)
            print(f"wheel: {try_in_stack(wheel, work, modules)}", flush=True)
        except WheelError as error:
            print(f"wheel-test failed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
