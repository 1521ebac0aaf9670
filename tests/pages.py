"""The documentation's pages, and their commands."""

import re
from pathlib import Path

from hydra import compose, initialize_config_dir

from dpexp import config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))]
FENCED = re.compile(r"^```(\w*)(?: title=\"(.*?)\")?\n(.*?)^```", re.DOTALL | re.MULTILINE)
NOT_JOBS = ("account", "certificate", "evaluate", "help", "predict", "report", "resume", "schema", "verify", "version")


def blocks(page, *languages):
    """(title, content) of a page's code blocks."""
    return [(title, content) for language, title, content in FENCED.findall(page.read_text()) if language in languages]


def name(path):
    return path.relative_to(ROOT).as_posix()


def composed(overrides):
    config.register()
    with initialize_config_dir(str(config.CONF), version_base="1.3"):
        return compose("config", overrides)
