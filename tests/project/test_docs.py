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
from dpexp.errors import ConfigError
from dpexp.privacy.gradients.layer_rules import RULES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))]
FENCED = re.compile(r"^```(\w*)(?: title=\"(.*?)\")?\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMANDS = ("account", "evaluate", "help", "predict", "report", "resume")


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
    if page.name == "models.md":
        dpexp_job("model=logistic", "sampling.steps=2", "tracking=none").rename("trained")
    namespace = {"__name__": "page"}
    for title, content in blocks(page, "python"):
        if not title:
            exec(compile(content, name(page), "exec"), namespace)
    if page.name == "own.md":
        assert len(read_ledger(tmp_path / "ledger.jsonl")) == 50


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
    config.register()
    for arguments in commands(page):
        if arguments and arguments[0] in COMMANDS:
            continue
        if arguments and arguments[0] == "audit":
            arguments = as_audit(arguments[1:])
        check(arguments)
        overrides = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
        if "-m" not in arguments:
            if "--config-dir" in arguments:
                folder = Path.cwd() / arguments[arguments.index("--config-dir") + 1]
                overrides.append(f"hydra.searchpath=[file://{folder}]")
            with initialize_config_dir(str(config.CONF), version_base="1.3"):
                assert compose("config", overrides).data.n > 0


def test_a_command_that_is_wrong_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```sh\npython -m dpexp group=per_layr  # a comment\n```\n")
    (arguments,) = commands(page)
    with pytest.raises(ConfigError, match="per_layer"):
        check(arguments)


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


MEASURED = ("mnist", "fashion", "pca_mlp", "adult", "shakespeare_users", "text", "cifar10")
NAMED = re.compile(rf"experiment=({'|'.join(MEASURED)})\w*\b")
FIGURE = re.compile(r"\b\d\d(\.\d+)? ?%|ε [=≤] \d+\.\d{3,}|\b0\.\d{3,} \|")


def strays(path):
    """Figures of an experiment of docs/results.md, in sentences and rows that don't tell what others report."""
    text = path.read_text()
    if path.suffix == ".yaml":  # the comment is about the experiment
        sections = [" ".join(line[1:] for line in text.splitlines() if line.startswith("# "))]
    else:
        sections = [part for part in re.split(r"^## ", text, flags=re.MULTILINE) if NAMED.search(part)]
    for part in sections:
        for piece in re.split(r"(?<=[.:;]) |(?<=[.:;])\n|\n\n|(?<=\|)\n", part):
            others = "publish" in piece or "report" in piece or (piece.startswith("|") and "| published |" in part)
            if FIGURE.search(piece) and not others:
                yield " ".join(piece.split())


@pytest.mark.parametrize("page", [*TEXTS, *sorted((ROOT / "conf/experiment").glob("*.yaml"))], ids=name)
def test_figures_of_experiments_stand_in_the_results_alone(page):
    assert page == DOCS / "results.md" or not [*strays(page)]
    assert not re.search(r"@[A-Z]+@|\bTODO\b|\bXXX\b", page.read_text()), "a placeholder"


def test_a_stray_figure_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A\n\n## B\n\n`experiment=text_lora` gets 39.4 % here. Others report 98.7 %.\n\n## C\n\n12 %\n")
    assert [*strays(page)] == ["`experiment=text_lora` gets 39.4 % here."]
    setting = tmp_path / "setting.yaml"
    setting.write_text("# @package _global_\n# They report 90 % at\n# ε = 0.5. Here 95.1 %.\nq: 1\n")
    assert [*strays(setting)] == ["Here 95.1 %."]


def test_the_first_job_has_its_figures_in_one_place():
    assert [page for page in TEXTS if re.search(r"^Test accuracy \d", page.read_text(), re.M)] == [ROOT / "README.md"]


def test_every_page_is_in_the_navigation():
    listed = [*leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])]
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


def leaves(nav):
    for entry in nav:
        for under in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [under] if isinstance(under, str) else leaves(under)
