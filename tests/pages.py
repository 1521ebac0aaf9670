"""The documentation's pages, and their commands."""

import json
import re
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir

from dpexp import config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NOTEBOOKS = sorted(DOCS.glob("tutorials/*.ipynb"))
TEXTS = [*PAGES, *NOTEBOOKS, *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))]
FENCED = re.compile(r"^```(\w*)(?: title=\"(.*?)\")?\n(.*?)^```", re.DOTALL | re.MULTILINE)
NOT_JOBS = (
    "account",
    "certificate",
    "evaluate",
    "mirror",
    "help",
    "predict",
    "report",
    "sample",
    "resume",
    "schema",
    "verify",
    "version",
)


def text_of(page):
    """A page; a notebook as one, with its commands in blocks."""
    if page.suffix != ".ipynb":
        return page.read_text()
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(page.read_text())["cells"]]
    code = re.sub(r" *\\\n *", " ", "\n".join(code for kind, code in cells if kind == "code"))
    commands = "\n".join(re.findall("^!(.*)$", code, re.MULTILINE))
    return "\n\n".join([*(text for kind, text in cells if kind == "markdown"), f"```sh\n{commands}\n```\n"])


def blocks(page, *languages):
    """(title, content) of a page's code blocks."""
    return [(title, content) for language, title, content in FENCED.findall(text_of(page)) if language in languages]


def prose(page):
    """A page without its code blocks."""
    return FENCED.sub("", text_of(page))


def name(path):
    return path.relative_to(ROOT).as_posix()


register = cache(config.register)


def composed(overrides):
    register()
    with initialize_config_dir(str(config.CONF), version_base="1.3"):
        return compose("config", overrides)
