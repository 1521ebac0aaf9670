"""The documentation's Python runs as printed, its commands are understood, and its links lead somewhere."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from dpexp import config
from dpexp.accounting.ledger import read_ledger
from dpexp.commands.command_line import as_audit, check
from dpexp.privacy.gradients.layer_rules import RULES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))]
FENCED = re.compile(r"^```(\w*)(?: title=\"(.*?)\")?\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMANDS = ("account", "evaluate", "help", "predict", "resume", "schema")


def blocks(page, *languages):
    """(title, content) of a page's code blocks."""
    return [(title, content) for language, title, content in FENCED.findall(page.read_text()) if language in languages]


def name(path):
    return path.relative_to(ROOT).as_posix()


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Goes to an empty folder, with the files that a page shows under their titles."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(page):
        for title, content in blocks(page, "yaml", "python"):
            if title:
                Path(title).parent.mkdir(parents=True, exist_ok=True)
                Path(title).write_text(content)

    return write


@pytest.fixture
def rules():
    """A rule that a page registers is forgotten."""
    known = dict(RULES)
    yield
    RULES.clear()
    RULES.update(known)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_runs(page, written, rules, tmp_path, dpexp_job):
    """A page's blocks one after the other, in one namespace."""
    written(page)
    if page.name == "own_loop.md":
        written(DOCS / "own.md")
    if page.name == "models.md":
        dpexp_job("model=logistic", "sampling.steps=2", "tracking=none").rename("trained")
    namespace = {"__name__": "page"}
    for title, content in blocks(page, "python"):
        if not title:
            exec(compile(content, name(page), "exec"), namespace)
    if page.name == "own_loop.md":
        rounds = [len(read_ledger(tmp_path / name)) for name in ("ledger.jsonl", "loop.jsonl", "adapter/ledger.jsonl")]
        assert rounds == [50, 50, 20]


def commands(page):
    """The arguments of each `python -m dpexp …` line."""
    for _, content in blocks(page, "sh"):
        for line in content.splitlines():
            _, found, arguments = line.partition("python -m dpexp")
            if found:
                yield shlex.split(arguments, comments=True)


@pytest.mark.parametrize("page", [page for page in TEXTS if any(commands(page))], ids=name)
def test_commands_are_understood(page, written):
    written(page)
    for arguments in commands(page):
        if arguments and arguments[0] in COMMANDS:
            continue
        if arguments and arguments[0] == "audit":
            arguments = as_audit(arguments[1:])
        check(arguments)
        overrides = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
        if "-m" not in arguments and not any(override.startswith("data.path=") for override in overrides):
            if "--config-dir" in arguments:
                folder = Path.cwd() / arguments[arguments.index("--config-dir") + 1]
                overrides.append(f"hydra.searchpath=[file://{folder}]")
            assert composed(overrides).data.n > 0


def composed(overrides):
    config.register()
    with initialize_config_dir(str(config.CONF), version_base="1.3"):
        return compose("config", overrides)


def test_ones_own_model_data_and_groups_train(written, dpexp_job):
    written(DOCS / "own.md")
    arguments, _ = commands(DOCS / "own.md")
    output = dpexp_job(*arguments, "sampling.steps=3", "tracking=none")
    (spec,) = read_ledger(output / "ledger.jsonl").rounds
    assert [query.group for query in spec.queries] == ["norms", "head", "body"]


@pytest.mark.parametrize("k", range(6))
def test_every_extension_of_ones_own_trains(k, written, rules, dpexp_job):
    """Each recipe is one Python file and one YAML file outside the package."""
    page = DOCS / "extending.md"
    written(page)
    recipes = [*commands(page)]
    assert len(recipes) == 6 == len([title for title, _ in blocks(page, "python") if title])
    length = () if "sampling=in_order" in recipes[k] else ("sampling.steps=2",)
    output = dpexp_job(*recipes[k], *length, "tracking=none")
    assert len(read_ledger(output / "ledger.jsonl")) == (9 if "sampling=in_order" in recipes[k] else 2)


def anchors(path):
    """Those that a page's headings make, as Markdown renderers do."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_relative_links_lead_somewhere(page):
    text = FENCED.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        assert to.exists(), target
        assert not anchor or anchor in anchors(to), target
        if page in PAGES:
            assert (page.parent / path).absolute().is_relative_to(DOCS), f"{target} leaves the site"
    for included, _, section in re.findall(r'^--8<-- "([\w.]+)(:(\w+))?"', text, re.M):
        assert not section or f"--8<-- [start:{section}]" in (ROOT / included).read_text()


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_references_name_what_exists(page):
    text = page.read_text()
    for path in re.findall(r"\]\[([\w.]+)\]|^::: ([\w.]+)", FENCED.sub("", text), re.M):
        assert found("".join(path)), path


def found(path):
    """Whether a dotted path leads to a module, or to what is in one."""
    parts = path.split(".")
    for k in range(len(parts), 0, -1):
        try:
            thing = import_module(".".join(parts[:k]))
        except ModuleNotFoundError:
            continue
        for part in parts[k:]:
            if not hasattr(thing, part):
                return False
            thing = getattr(thing, part)
        return True
    return False


def test_every_page_is_in_the_navigation():
    listed = [*leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])]
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


def leaves(nav):
    for entry in nav:
        for under in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [under] if isinstance(under, str) else leaves(under)


def test_readmes_table_names_every_option():
    conf = ROOT / "conf"
    table = (ROOT / "README.md").read_text().partition("## Configuration")[2].partition("## ")[0]
    for folder in sorted({path.parent for path in conf.glob("**/*.yaml")} - {conf}):
        group = folder.relative_to(conf).as_posix()
        (row,) = re.findall(rf"^\| `{group}` \| (.*?) \|", table, re.MULTILINE)
        options, named = {path.stem for path in folder.glob("*.yaml")}, set(re.findall(r"`(\w+)`", row))
        assert options <= named if group.startswith("hydra/") else options == named, group  # Hydra brings some


RESULT = re.compile(r"^\| (\w+) \| .* % \| ([\d.]+) \| [-e\d.]+ \| \d+ \| [\d.]+ \| `([^`]+)` \|", re.MULTILINE)


def test_every_result_has_a_command_and_costs_no_more_than_its_target(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    rows = RESULT.findall((DOCS / "results.md").read_text())
    assert {experiment for experiment, *_ in rows} == {*import_module("results").ROWS}
    for _, epsilon, command in rows:
        assert float(epsilon) <= composed(command.split()).privacy.epsilon
