"""What pyproject.toml cannot say: every package in the three folders, so that none is left out of the wheel.

``hooks/`` and ``dashboards/`` stand at the top of the tree and are imported as ``driftscope.hooks`` and
``driftscope.dashboards``. Every folder in them that holds a file is a package, data folders (templates) included.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
HOMES = {"driftscope": "driftscope", "driftscope.hooks": "hooks", "driftscope.dashboards": "dashboards"}


def packages() -> list[str]:
    """Dotted names of all folders that hold a file; the links inside ``driftscope/`` are not followed."""
    names = set()
    for package, folder in HOMES.items():
        for path in (ROOT / folder).rglob("*"):
            parts = path.relative_to(ROOT / folder).parent.parts
            # Older Pythons' rglob follows links; packages behind them have their own entry in HOMES.
            linked = package == "driftscope" and parts[:1] in (("hooks",), ("dashboards",))
            if path.is_file() and not linked and "__pycache__" not in parts:
                names.add(".".join((package, *parts)))
    return sorted(names)


if __name__ == "__main__":
    setup(packages=packages(), package_dir=HOMES)
