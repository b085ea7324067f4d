"""The wheel is complete: away from the checkout it finds its configs and answers --help."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def shipped(folder: Path) -> set[str]:
    """The files of a folder of the checkout, without what Python and tools leave there."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in files if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder that the wheel is unpacked to. Built from a copy: setuptools reuses build/."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("mmqa_jax", "configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    ended = subprocess.run(
        [sys.executable, "-c", build, str(out)], cwd=source, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    (wheel,) = out.glob("*.whl")
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_every_file_is_in_the_wheel(installed):
    package = installed / "mmqa_jax"
    assert shipped(ROOT / "configs") == shipped(package / "configs")
    assert shipped(ROOT / "mmqa_jax") == {
        name for name in shipped(package) if not name.startswith("configs/")
    }
    assert (package / "py.typed").is_file()
    tops = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert tops == {"mmqa_jax"}


def test_the_wheel_has_the_license(installed):
    (about,) = installed.glob("*.dist-info")
    assert "License-Expression: Apache-2.0\n" in (about / "METADATA").read_text("utf-8")
    assert (about / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def run(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Python in an empty folder, with the unpacked wheel before everything else."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_configs_are_found_by_name(installed, tmp_path):
    script = (
        "import mmqa_jax\n"
        "from mmqa_jax.core.config import find_config, load_config\n"
        "print(mmqa_jax.__file__)\n"
        "print(find_config('configs/atlas/demo.py'))\n"
        "load_config('configs/atlas/demo.py:runlocal')\n"
        "load_config('configs/atlas/answer.py:runlocal')  # has small.py beside it\n"
    )
    ended = run(installed, tmp_path, "-c", script)
    assert ended.returncode == 0, ended.stderr
    package = installed / "mmqa_jax"
    assert ended.stdout.split() == [
        str(package / "__init__.py"),
        str(package / "configs/atlas/demo.py"),
    ]


@pytest.mark.parametrize("arguments", [("--help",), ("demo", "--help")])
def test_help_answers(arguments, installed, tmp_path):
    ended = run(installed, tmp_path, "-m", "mmqa_jax.cli", *arguments)
    assert ended.returncode == 0, ended.stderr
    assert "usage: mmqa" in ended.stdout


def test_default_configs_are_found(installed, tmp_path):
    """The demo reads its default config: only the override is wrong."""
    script = (
        "from mmqa_jax.cli import main\n"
        "for flag in ('--config.nothing=1', '--config=configs/none.py'):\n"
        "    print(main(['demo', flag]))\n"
    )
    ended = run(installed, tmp_path, "-c", script)
    assert ended.stdout.split() == ["2", "2"]
    unknown, absent = ended.stderr.splitlines()
    assert "configs/atlas/demo.py has no such key" in unknown
    assert "--config=configs/none.py: no such config file" in absent
