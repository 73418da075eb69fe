"""Links between pages lead somewhere, and the pages of the design stay short."""

from __future__ import annotations

import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Lines of a page that somebody reads in one go.
TOUR_LINES, ROOM_LINES = 180, 120


def pages() -> list[pathlib.Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE)
    shown = (re.sub(r"\[([^]]*)]\([^)]*\)|[`*]", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in shown}


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in pages():
        for link in re.findall(r"]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_pages_of_the_design_are_short_and_reached_from_the_tour() -> None:
    tour = ROOT / "docs/design.md"
    rooms = sorted((ROOT / "docs/design").glob("*.md"))
    assert len(tour.read_text(encoding="utf-8").splitlines()) <= TOUR_LINES
    assert [page.name for page in rooms if len(page.read_text(encoding="utf-8").splitlines()) > ROOM_LINES] == []
    linked = set(re.findall(r"\(design/([\w-]+\.md)", tour.read_text(encoding="utf-8")))
    assert {page.name for page in rooms} == linked
