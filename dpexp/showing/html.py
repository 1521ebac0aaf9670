"""HTML that stands alone: tables, paragraphs and figures on one page."""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1400px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.25em; margin-top: 2em; border-bottom: 1px solid #ddd; }
p, figcaption { max-width: 65em; }
table { border-collapse: collapse; font-size: 13px; line-height: 1.35; }
th, td { padding: 3px 8px; text-align: left; vertical-align: top; border-bottom: 1px solid #e4e4e4; }
th { position: sticky; top: 0; background: #f4f4f4; }
td { white-space: nowrap; }
td:first-child { white-space: normal; min-width: 12em; }
td:last-child:not(.number) { white-space: normal; min-width: 10em; max-width: 40em; }
th.number { text-align: right; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
.scroll { overflow: auto; max-height: 26em; border: 1px solid #ddd; margin: 1em 0; }
.scroll { width: fit-content; max-width: 100%; }
figure { margin: 1em 0; } figure img { max-width: 100%; height: auto; }
figcaption, .note { color: #555; font-size: 14px; }
@media print { .scroll { max-height: none; overflow: visible; } }
"""


def page(title: str, body: Iterable[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraphs(texts: Iterable[str], kind: str = "") -> list[str]:
    attribute = f' class="{kind}"' if kind else ""
    return [f"<p{attribute}>{escape(text)}</p>" for text in texts]


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[str] = ()) -> str:
    """A table of plain texts; the columns in `numbers` are set flush right."""
    right = set(numbers)
    kinds = [' class="number"' if name in right else "" for name in header]

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}{k}>{escape(c)}</{tag}>" for k, c in zip(kinds, cells, strict=True)) + "</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table>\n<thead>{line("th", header)}</thead>\n<tbody>\n{body}\n</tbody></table></div>'


def picture(path: Path, figure: Figure, caption: str) -> str:
    """Writes the figure, and returns it as HTML that needs no file."""
    figure.savefig(path, dpi=110)
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{escape(caption)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
