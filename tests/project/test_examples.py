"""The examples in docstrings: they run, and each name that `import dpexp` offers has one."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import dpexp

PAGES = Path(__file__).parents[2] / "docs" / "reference"
NAMED = {name for page in PAGES.glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)}
WITHOUT = {"Sampling", "Noise"}  # names of 0.1, which say what they are called now


def module_of(name):
    """The module of a name on a page, which may be that of a class or a function."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return importlib.import_module(name.rpartition(".")[0])


MODULES = sorted({module_of(name).__name__ for name in NAMED})


@pytest.mark.parametrize("name", [name for name in MODULES if ">>>" in Path(module_of(name).__file__).read_text()])
@pytest.mark.filterwarnings("ignore")
def test_examples_print_what_they_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted and not found.failed


@pytest.mark.parametrize("name", sorted({*dpexp.__all__} - WITHOUT))
def test_each_name_of_the_library_has_an_example(name):
    text = getattr(dpexp, name).__doc__
    assert ">>>" in text or "private.rounds" in text or "dpexp.load(" in text
