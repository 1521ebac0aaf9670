"""The examples in docstrings: they run, and each name that `import dpexp` offers has one."""

import doctest
import inspect
import re
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

import dpexp

PAGES = Path(__file__).parents[2] / "docs" / "reference"
NAMED = {name for page in PAGES.glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)}
WITHOUT = {"Sampling", "Noise"}  # names of 0.1, which say what they are called now
# Some names on a page are of a class or a function, which know their module.
MODULES = {getattr(found, "__module__", found.__name__) for found in map(resolve_name, NAMED)}


@pytest.mark.parametrize("name", [name for name in sorted(MODULES) if ">>>" in inspect.getsource(sys.modules[name])])
@pytest.mark.filterwarnings("ignore")
def test_examples_print_what_they_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = doctest.testmod(sys.modules[name])
    assert found.attempted and not found.failed


@pytest.mark.parametrize("name", sorted({*dpexp.__all__} - WITHOUT))
def test_each_name_of_the_library_has_an_example(name):
    text = getattr(dpexp, name).__doc__
    assert ">>>" in text or "for sample in private.rounds(dataset):" in text
