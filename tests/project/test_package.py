"""What the package says of itself, and what its wheel will hold."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

import dpexp

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_a_wheel_has_code_and_configuration():
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["only-include"] == ["dpexp", "conf"] and wheel["sources"] == {"conf": "dpexp/conf"}


def test_the_package_is_found_from_a_folder_with_one_of_its_name(tmp_path):
    """As from the folder above a checkout."""
    (tmp_path / "dpexp").symlink_to(ROOT)
    code = "import dpexp; print(dpexp.__file__, dpexp.ConfigError.__name__)"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert found.stdout.split() == [str(ROOT / "dpexp" / "__init__.py"), "ConfigError"], found.stderr


def test_names_are_those_of_the_stub():
    assert {*dpexp.__all__} == {*dir(dpexp)}
    assert all(getattr(dpexp, name).__name__ == name for name in dpexp.__all__)
    namespace = {}
    exec("from dpexp import *", namespace)
    assert {*dpexp.__all__} <= {*namespace}


def test_type_checkers_know_the_names(tmp_path):
    (tmp_path / "user.py").write_text('import dpexp\n\ndpexp.make_plan(42, n="many", samplng=3)\ndpexp.make_plam\n')
    own = [str(ROOT / "dpexp" / name) for name in ("__init__.pyi", "privacy/plan/make.py", "privacy/plan/options.py")]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=skip", "user.py", *own],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    said = [line for line in checked.stdout.splitlines() if line.startswith("user.py")]
    assert "samplng" in said[0] and 'argument "n"' in checked.stdout.lower() and "make_plam" in said[-1], checked.stdout


def test_one_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", dpexp.__version__)
    assert "version" not in PROJECT["project"] and PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["hatch"]["version"] == {"path": "dpexp/__init__.py"}
    assert f"\n## {dpexp.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_licence_types_and_citation():
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()
    assert (ROOT / "dpexp" / "py.typed").exists()
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
