"""Text that programs write into pages: what stands between two marks, and nothing else."""

from __future__ import annotations

import re


def placed(page: str, name: str, text: str) -> str:
    """The page with this text between `<!-- figures: NAME -->` and `<!-- /figures -->` behind it.

    Raises:
        ValueError: The page has no such place.
    """
    place = re.compile(rf"(<!-- figures: {re.escape(name)} -->\n).*?(<!-- /figures -->)", re.DOTALL)
    found, count = place.subn(lambda match: match[1] + text + match[2], page)
    if not count:
        raise ValueError(f"there is no <!-- figures: {name} --> with a <!-- /figures --> behind it")
    return found
