"""README's Python example runs as printed."""

import re
from pathlib import Path

from dpexp.accounting.ledger import read_ledger

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_library_example_runs(tmp_path, monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.splitlines()) < 20
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    assert len(read_ledger("ledger.jsonl")) == 50
    assert 2.99 < float(capsys.readouterr().out.splitlines()[-1]) <= 3.0


def test_the_table_names_every_option():
    conf = Path(__file__).parent.parent / "conf"
    table = README.partition("## Configuration")[2].partition("## ")[0]
    for folder in sorted({path.parent for path in conf.glob("**/*.yaml")} - {conf}):
        name = folder.relative_to(conf).as_posix()
        (row,) = re.findall(rf"^\| `{name}` \| (.*?) \|", table, re.MULTILINE)
        options, named = {path.stem for path in folder.glob("*.yaml")}, set(re.findall(r"`(\w+)`", row))
        assert options <= named if name.startswith("hydra/") else options == named, name  # Hydra brings some of its own
