"""What the package says of itself, and what its wheel will hold."""

import re
import tomllib
from pathlib import Path

import yaml

import dpexp

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_folder_of_code_is_packaged():
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "dpexp").rglob("__init__.py")}
    assert {*PROJECT["tool"]["setuptools"]["packages"]} == folders | {"dpexp.conf", "dpexp.conf.sweep"}


def test_one_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", dpexp.__version__)
    assert "version" not in PROJECT["project"] and PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "dpexp.__version__"}
    assert f"\n## {dpexp.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_licence_types_and_citation():
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()
    assert (ROOT / "dpexp" / "py.typed").exists()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["dpexp"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["license"] == "Apache-2.0" and cited["title"].startswith("dpexp:")
    assert cited["version"] == dpexp.__version__
    assert cited["references"][0]["identifiers"][0]["value"] == "arXiv:1812.06210"


def test_the_lock_has_the_versions_of_constraints_with_hashes():
    requirement = re.compile(r"^([a-z0-9.-]+)==(\S+)[^\\]*((?:\\\n    --hash=sha256:[0-9a-f]{64} ?)+)$", re.MULTILINE)
    text = (ROOT / "requirements.txt").read_text()
    locked = {name: version for name, version, _ in requirement.findall(text)}
    assert all(line.startswith("# ") for line in requirement.sub("", text).splitlines() if line)
    lines = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
    known = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {name for name in locked.keys() & known if locked[name] != known[name]} == set()
    assert {re.match(r"[\w-]+", line)[0].lower() for line in PROJECT["project"]["dependencies"]} <= locked.keys()
