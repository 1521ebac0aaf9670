"""The documentation's Python runs as printed, its commands are understood, and its links lead somewhere."""

import re
import shlex
from importlib import import_module
from math import ceil
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import yaml

import dpexp
from dpexp.accounting import ledger as ledgers
from dpexp.accounting import sampling
from dpexp.accounting.coverage import check_delta
from dpexp.accounting.ledger import Ledger, OneTimeQueryEvent, Round, SumQueryEvent, read_ledger
from dpexp.accounting.risk import risk
from dpexp.accounting.sampling import sampling_event
from dpexp.commands import validate
from dpexp.commands.command_line import COMMANDS, as_audit, check
from dpexp.errors import ConfigError
from dpexp.privacy import round as rounds_module
from dpexp.privacy.private_metrics import metric_releases
from tests.pages import DOCS, FENCED, NOT_JOBS, NOTEBOOKS, PAGES, ROOT, TEXTS, blocks, composed, name, prose, text_of

CHOOSING = (DOCS / "choosing.md").read_text()


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


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_runs(page, written, tmp_path, dpexp_job):
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


def test_readmes_python_runs(written):
    """With a model and data as its reader has them."""
    written(DOCS / "own.md")
    mine = import_module("mine")
    module, data = mine.Spotter(width=16), mine.Lights(records=2000)
    namespace = {
        "dpexp": dpexp, "pl": pl, "n": 2000, "module": module, "data": data, "model": module, "train_set": data.train,
        "optimizer": module.configure_optimizers(), "loss_of": lambda model, record: model.training_step(record),
    }  # fmt: skip
    programs = blocks(ROOT / "README.md", "python")
    assert len(programs) == 2
    for _, content in programs:
        exec(compile(content, "README.md", "exec"), namespace)


def test_choosing_says_what_an_epsilon_allows():
    """Its table, of the default job."""
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) % \|$", CHOOSING, re.MULTILINE)
    assert len(rows) == 5
    for epsilon, *printed in rows:
        plan = dpexp.plan(composed([f"privacy.epsilon={epsilon}"]))
        figures = risk(plan.ledger()).figures()
        advantage, found = ceil(100 * figures["advantage"]), ceil(1000 * figures["tpr_at_fpr_0.01"])
        assert printed == [f"{plan.noise_multiplier:.1f}", f"{advantage / 100:.2f}", f"{found / 10:.1f}"], epsilon


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
        command = arguments[0] if arguments else ""
        if command in NOT_JOBS:
            keys = [argument.partition("=")[0] for argument in arguments if "=" in argument]
            assert all(f"{key}=" in COMMANDS[command] for key in keys), arguments
            continue
        if command == "audit":
            arguments = as_audit(arguments[1:])
        elif command == "copy":
            arguments = arguments[1:-1]
        elif command.endswith(".yaml"):  # which copy wrote
            arguments = arguments[1:]
        check(arguments)
        overrides = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
        if "-m" not in arguments and not any(override.startswith("data.path=") for override in overrides):
            if "--config-dir" in arguments:
                folder = Path.cwd() / arguments[arguments.index("--config-dir") + 1]
                overrides.append(f"hydra.searchpath=[file://{folder}]")
            cfg = composed(overrides)
            validate.check(cfg)
            metric_releases(cfg.private_metrics.release or {})


@pytest.mark.usefixtures("bare")
def test_ones_own_model_data_and_groups_train(written, dpexp_job):
    written(DOCS / "own.md")
    arguments, _ = commands(DOCS / "own.md")
    output = dpexp_job(*arguments, "sampling.steps=3", "tracking=none")
    (spec,) = read_ledger(output / "ledger.jsonl").rounds
    assert [query.group for query in spec.queries] == ["norms", "head", "body"]


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("k", range(6))
def test_every_extension_of_ones_own_trains(k, written, dpexp_job):
    """Each recipe is one Python file and one YAML file outside the package."""
    page = DOCS / "extending.md"
    written(page)
    recipes = [*commands(page)]
    assert len(recipes) == 6 == len([title for title, _ in blocks(page, "python") if title])
    length = (
        ("sampling.epochs=1",) if "sampling=in_order" in recipes[k] else ("sampling.steps=2", "sampling.epochs=null")
    )
    output = dpexp_job(*recipes[k], *length, "trainer.num_evaluations=0", "tracking=none")
    assert len(read_ledger(output / "ledger.jsonl")) == (3 if "sampling=in_order" in recipes[k] else 2)


PRINTED = {  # a job: the pages that show its plan
    "group=conv_fc mechanism=joint": ("README.md", "docs/reading_a_run.md"),
    "preprocessing=[class_counts,standardize,pca] preprocessing.pca.k=20 model=mlp model.shape=[20] sampling.steps=60":
        ("docs/preprocessing.md",),
}  # fmt: skip
OF_CHANCE = ("dpexp: ", "The step is", "round ", "Test accuracy", "Balanced accuracy")  # lines of a job that trains


@pytest.mark.parametrize("job", PRINTED)
def test_a_page_shows_what_a_job_prints(job, dpexp_job, capsys):
    dpexp_job(*job.split(), "train=false", "tracking=none")
    printed = capsys.readouterr().out.splitlines()
    for page in PRINTED[job]:
        shown = next(content for _, content in blocks(ROOT / page, "text", "") if content.startswith(("Plan: ", "┏")))
        wrong = [line for line in shown.splitlines() if line not in printed and not line.startswith(OF_CHANCE)]
        assert wrong == [], page


def test_tables_that_pages_show_have_the_terminals_headings():
    source = "".join(path.read_text() for path in (ROOT / "dpexp/reporting").glob("*.py"))
    for heading in re.findall("(?<=┃)[^┃\\n]+(?=┃)", "".join(text_of(page) for page in TEXTS)):
        assert f'"{heading.strip()}"' in source


def test_a_page_shows_what_an_error_says():
    for page in PAGES:
        for command, said in re.findall(r"^\$ python -m dpexp (.*)\ndpexp: (.*)$", page.read_text(), re.MULTILINE):
            with pytest.raises(ConfigError) as refused:
                check(shlex.split(command))
            assert str(refused.value) == said


SPAN = re.compile(r"(?<![`\\])(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
WORD = re.compile(rf"-{{1,2}}[\w-]+|[+~]?[\w./@]+=.+|[A-Z]+(\.yaml)?|…|{'|'.join(COMMANDS)}")  # of a command


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_code_spans_are_whole(page):
    """Each begins and ends in its paragraph or cell, not within a word; a command holds what a command can."""
    for part in re.split(r"\n(?=\s*\n|\||[-*] |#)|(?<!\\)\|", prose(page)):
        assert "`" not in SPAN.sub("", part), part
        for span in SPAN.finditer(part):
            assert not re.match(r"[\w=]|[./]\w\w", part[span.end() :]), part
            assert not re.match(r"[\w=/+~]", part[span.start() - 1 : span.start()]), part
            command = re.sub(r" \[[^\]]*\]", "", span[2]).partition("python -m dpexp")[2]
            assert all(WORD.fullmatch(word) for word in shlex.split(command)), span[2]


def title(path):
    """A page's; of a page that includes another, that one's."""
    text = path.read_text()
    included = re.match(r'--8<-- "([\w.]+)"', text)
    return title(ROOT / included[1]) if included else re.search("^# (.*)$", text, re.MULTILINE)[1]


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_a_link_to_a_page_is_its_title(page):
    """Up to the case of letters; a link to a section may say what it is there for."""
    for text, target in re.findall(r"(?<!!)\[([^\]]+)\]\(([\w./]+\.md)\)", prose(page)):
        assert " ".join(text.split()).lower() == title(page.parent / target).lower(), target


def anchors(path):
    """Those that a page's headings make, as Markdown renderers do."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_relative_links_lead_somewhere(page):
    text = prose(page)
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


def test_links_of_tutorials_lead_to_the_sites_folders(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    changed = import_module("tutorial_links").on_page_content
    html = '<a href="../own.md#groups">x</a><a href="loop.ipynb">y</a><a href="https://example.org/a.md">z</a>'
    notebook = SimpleNamespace(file=SimpleNamespace(src_path="tutorials/table.ipynb"))
    links = re.findall('href="(.*?)"', changed(html, notebook))
    assert links == ["../../own/#groups", "../loop/", "https://example.org/a.md"]


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_references_name_what_exists(page):
    for path in re.findall(r"\]\[([\w.]+)\]|^::: ([\w.]+)", prose(page), re.M):
        assert resolve_name("".join(path)) is not None


NAVIGATION = re.findall(r"^ +- .*?(\S+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)


def test_every_page_is_in_the_navigation():
    assert sorted(NAVIGATION) == sorted(page.relative_to(DOCS).as_posix() for page in (*PAGES, *NOTEBOOKS))


def test_the_home_page_leads_to_what_people_have():
    """It has README's commands, each way of training one's own, and each tutorial but that of sweeps."""
    home = (DOCS / "index.md").read_text()
    ways = {f"own_loop.md#{anchor}" for anchor in anchors(DOCS / "own_loop.md") if anchor.startswith("i-have")}
    ways |= {f"own_data.md#{anchor}" for anchor in ("a-table", "images", "fine-tune-a-language-model")}
    ways |= {f"tutorials/{notebook.name}" for notebook in NOTEBOOKS} - {"tutorials/sweep.ipynb"}
    assert len(ways) == 12 and [way for way in ways if f"({way})" not in home] == []
    assert '--8<-- "README.md:commands"' in home
    assert NAVIGATION[:4] == ["index.md", "quick_start.md", "own_data.md", "own_loop.md"]


GLOSSARY = (DOCS / "glossary.md").read_text()


def cost(q, rounds, z, accountant="pld"):
    """ε at δ = 1e-5 with two decimals, rounded up."""
    one = Round(sampling_event("poisson", q, 60_000), (SumQueryEvent("all", 1.0, z),))
    return f"{ceil(100 * dpexp.epsilon(Ledger('add_remove', {one: rounds}), 1e-5, accountant)) / 100:.2f}"


def test_the_glossarys_figures_come_out():
    said = re.findall(r"([\d.]+) in (\d+) rounds at q = ([\d.]+)", GLOSSARY)
    assert len(said) == 3 and [epsilon for epsilon, *_ in said] == [cost(float(q), int(T), 1.0) for _, T, q in said]
    sweep = yaml.safe_load((ROOT / "sweeps" / "noise_cost.yaml").read_text())["sampling"]
    q = sweep["expected_batch_size"] / 60_000
    by_accountant = re.findall(r"([\d.]+) by `(pld|rdp|moments)`", GLOSSARY)
    assert by_accountant == [(cost(q, ceil(sweep["epochs"] / q), 0.7, name), name) for _, name in by_accountant] != []


def test_the_glossary_says_which_delta_is_refused():
    """Of a Laplace query alone, ε at the least δ is S/scale, that of pure differential privacy."""
    with pytest.raises(ConfigError):
        check_delta(0.0)
    check_delta(1e-300)
    one = {Round(sampling_event("all", 1.0, 9), (OneTimeQueryEvent("x", "laplace", 1.0, 2.0, 2.0),)): 1}
    ledger = Ledger("add_remove", one)
    assert dpexp.delta(ledger, 0.5) <= 1e-300 < dpexp.delta(ledger, 0.5 * (1 - 1e-12))


def test_the_glossarys_classes_exist():
    rows = [row.split("|")[3] for row in GLOSSARY.partition("\n## ")[0].splitlines() if row.startswith("| ")][1:]
    names = re.findall(r"`([A-Z]\w+)", " ".join(rows))
    assert len(names) > 12 and {"SamplingEvent", "SumQueryEvent", "RoundEngine"} <= {*names}
    assert [
        name for name in names if not any(hasattr(place, name) for place in (dpexp, ledgers, sampling, rounds_module))
    ] == []


def test_the_pages_of_options_and_commands_are_current(monkeypatch):
    """They are what python benchmarks/reference_pages.py writes: each option, and each key with what it means."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    reference, conf = import_module("reference_pages"), ROOT / "conf"
    for page, written in reference.PAGES.items():
        assert (DOCS / page).read_text() == written(), f"{page}: run python benchmarks/reference_pages.py"
    text = (DOCS / "options.md").read_text()
    for folder in sorted({path.parent for path in conf.glob("**/*.yaml")} - {conf}):
        section = text.partition(f"\n## {folder.relative_to(conf).as_posix()}\n")[2].partition("\n## ")[0]
        assert {path.stem for path in folder.glob("*.yaml")} <= {*re.findall(r"^\| `(\w+)`", section, re.MULTILINE)}
    keys = re.findall(r"^\| `([\w.]+)` \| (?:`.*`)? \| .* \| (.*) \|$", text, re.MULTILINE)
    assert len(keys) > 120 and not [key for key, meaning in keys if not meaning or meaning.endswith(": ")]


RESULT = re.compile(r"^\| `([^`]+)` \| ([\d.]+) \| .* \| [\d.]+ \|$", re.MULTILINE)


def test_every_result_has_a_command_and_costs_no_more_than_its_target(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    results = import_module("results")
    rows = RESULT.findall((DOCS / "results.md").read_text())
    assert {results.row_of(command) for command, _ in rows} == {*results.ROWS}
    targets = {}  # of the commands without one of their own
    for command, epsilon in rows:
        others, *own = re.split(r" ?privacy\.epsilon=([\d.]+)", command)
        if others not in targets:
            targets[others] = composed(others.split()).privacy.epsilon
        assert not any(own[1:]) and float(epsilon) <= float(own[0] if own else targets[others])
