"""A hook of mkdocs.yml: links of notebooks to pages, docs/tutorials/*.ipynb, lead to the site's folders."""

import re
from typing import Any


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """MkDocs turns links of Markdown pages alone; a notebook's page is one folder deeper than its file."""
    if not page.file.src_path.endswith(".ipynb"):
        return html
    return re.sub(r'href="([\w./]+)\.(?:md|ipynb)(#[^"]*)?"', r'href="../\1/\2"', html)
