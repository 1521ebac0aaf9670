"""Runs the tutorials, docs/tutorials/*.ipynb, each in an empty folder.

python benchmarks/tutorials.py [NAME ...]           # fails if a cell does
python benchmarks/tutorials.py --write [NAME ...]   # also keeps the outputs
"""

import os
import re
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import nbformat
from nbclient import NotebookClient
from report import DOCS, parser

FOLDER = DOCS / "tutorials"
PLAIN = {  # text without colours and progress bars, set by a first cell, since the kernel sets some otherwise
    "TERM": "dumb", "TTY_COMPATIBLE": "0", "NO_COLOR": "1", "FORCE_COLOR": "", "CLICOLOR_FORCE": "", "COLUMNS": "110",
    "MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "LOGNAME": "ann",
    "TRANSFORMERS_VERBOSITY": "error",
}  # fmt: skip
FIRST = f"""
import os

os.environ.update({PLAIN})
_system = get_ipython().system


def _checked(command):  # a command that fails ends the notebook, unless it says so
    _system(command)
    if get_ipython().user_ns["_exit_code"] and "# refused" not in command:
        raise RuntimeError(command)


get_ipython().system = _checked
"""
NOISE = re.compile(  # lines of the store's first start, of Lightning's, and of tqdm
    r"^(?:(?:INFO|\d{4}/\d\d/\d\d .* INFO|GPU available|TPU available|HPU available|💡 Tip|Seed set)\b.*"
    r"|.* TqdmWarning: .*\n  .*|.*_pytree[.]py:.*)\n?", re.MULTILINE,
)  # fmt: skip
WARNING = re.compile(r"^\S+[.]py:\d+: (\w*Warning: .*)\n  .*\n", re.MULTILINE)  # without its place


def cleaned(text: str) -> str:
    """What a reader sees of a stream, without what depends on the machine."""
    return WARNING.sub(r"\1\n", NOISE.sub("", re.sub(r"\r+\n", "\n", text)))


def tidy(notebook: nbformat.NotebookNode, folder: str) -> None:
    """Joins the parts of a cell's output, and takes out what depends on the machine."""
    for number, cell in enumerate((one for one in notebook.cells if one.cell_type == "code"), 1):
        cell.execution_count, kept = number, []
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
            if output.output_type == "stream" and kept and kept[-1].get("name") == output.name:
                kept[-1].text += output.text
            else:
                kept.append(output)
        for output in kept:
            if output.output_type == "stream":
                output.text = cleaned(output.text).replace(f"{folder}/", "")
        cell.outputs = [one for one in kept if one.output_type != "stream" or one.text.strip()]
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def run(path: Path, write: bool) -> None:
    """Executes a notebook; what it makes is left in a folder that is deleted."""
    notebook, start = nbformat.read(path, as_version=4), perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        notebook.cells.insert(0, nbformat.v4.new_code_cell(FIRST))
        where = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where, record_timing=False).execute()
        del notebook.cells[0]
    tidy(notebook, folder)
    print(f"{path.name}: {perf_counter() - start:.0f} s")
    if write:
        nbformat.write(notebook, path)


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("names", nargs="*", metavar="NAME")
    options.add_argument("--write", action="store_true")
    chosen = options.parse_args()
    os.environ.update(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for name in chosen.names or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        run(FOLDER / f"{name}.ipynb", chosen.write)
