"""Holds what a tool can hold of how our text is written, for `make words`.

    python tools/check_words.py [--summary] [FOLDER or FILE ...]

Four rules, each with the place of every finding:

    opening   a docstring, and each entry of its Args, begins with its subject or verb, not with Of,
              As, Those, The same, Where, That or See
    word      one idea has one word, the field's; a retired word is found in names, strings,
              comments and prose
    width     prose in Markdown wraps at 100 columns (Python's columns are ruff's: E501 and W505)
    folder    a folder of product code has at most 20 Python files

Ends with 1 if there are findings. Logs of the past (the changelog, docs/experiments.md) keep their
words. Imports nothing but the standard library.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import io
import pathlib
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
MARKDOWN_COLUMNS = 100
MOST_FILES = 20
KINDS = (".py", ".md", ".proto")
PRODUCT = ("service", "backend", "both_sides", "kernels", "clients/python")
# Logs keep the words of their time; the demo model is made of ordinary English; two files are about
# retired words.
KEEP_THEIR_WORDS = (
    "CHANGELOG.md",
    "docs/experiments.md",
    "models/demo/",
    "tools/check_words.py",
    "tests/house/test_words.py",
)
OPENINGS = re.compile(r"(Of|As|Those|The same|Where|That|See)\b")
# An entry of a docstring's Args: a name, perhaps with stars, and what follows the colon.
_ENTRY = re.compile(r"    \*{0,2}\w+: (.*)")

# What is retired, and what says the same. A pattern sees a line of prose, or a name of the code
# with spaces for its underscores. Words that also have an ordinary meaning are found beside the
# words that show the retired one, or not beside those that show the ordinary one.
RETIRED = {
    r"(un)?sound(ness)?": "finite (values), valid (files), healthy (processes)",
    r"turned(?! (on|off|into|away|out|down|over)\b)": "transposed (matrices), rotated (queries and keys)",
    r"restor(e|ed|es|ing) (\w+ )?(number|weight|value|row|for cublas)s?": "dequantize",
    r"restored (linear|weights|numbers)": "dequantized",
    r"sums? (over|of|among|between|across) (the |all |both |\w+ )?(ranks|gpus|cards)": "all-reduce, collectives",
    r"(large|small|long|ranks'|rank's|pending|begun) sums?": "all-reduce, collectives",
    r"(tell|tells|told|telling) of": "report, reported",
    r"told(?! (apart|from|a story)\b)": "reported",
    r"made[ -]up(?! for)": "synthetic (steps), dummy (weights)",
    r"unlike layers?": "representative layers",
    r"blank(?! lines?\b)": "sentinel",
    r"parted": "mixed-format",
    r"wish(es|ed)?": "request, option",
    r"(few|row|small|wide) kernels": "GEMV, small-batch or GEMM kernels",
}
_RETIRED = [(re.compile(rf"\b{pattern}\b", re.IGNORECASE), instead) for pattern, instead in RETIRED.items()]


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One place that breaks a rule. `line` counts from 1; a folder has 0."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


def retired_words(text: str) -> Iterator[str]:
    """Yields a message for each retired word in one line of prose, or in one name."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text.replace("_", " "))
    for pattern, instead in _RETIRED:
        if found := pattern.search(spaced):
            yield f"{found.group(0)!r}: say {instead}"


def check_words(path: str, lines: Iterable[tuple[int, str]]) -> Iterator[Finding]:
    """Yields findings of retired words in numbered lines."""
    if path.startswith(KEEP_THEIR_WORDS):
        return
    for number, text in lines:
        for message in retired_words(text):
            yield Finding(path, number, "word", message)


def words_of_code(source: str) -> Iterator[tuple[int, str]]:
    """Yields each name, and each line of each string and comment, with its line number."""
    texts = (tokenize.NAME, tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in texts:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def openings(docstring: str) -> Iterator[tuple[int, str]]:
    """Yields how a docstring and each entry of its Args begin, with their lines counted from 0."""
    yield 0, docstring
    in_args = False
    for offset, line in enumerate(docstring.splitlines()):
        if line and not line.startswith(" "):
            in_args = line in ("Args:", "Attributes:")
        elif in_args and (entry := _ENTRY.match(line)):
            yield offset, entry.group(1)


def check_openings(path: str, source: str) -> Iterator[Finding]:
    """Yields docstrings, and entries of their Args, that do not read alone."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, kinds) or not (docstring := ast.get_docstring(node)):
            continue
        for offset, text in openings(docstring):
            if found := OPENINGS.match(text):
                place = node.body[0].lineno + offset
                yield Finding(path, place, "opening", f"begins with {found.group(0)!r}: {text.splitlines()[0][:60]}")


def prose_of_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yields numbered lines that wrap: no code, tables, headings, quotations or images."""
    fenced = commented = indented = False
    before = ""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        fence = stripped.startswith(("```", "~~~"))
        commented = commented or stripped.startswith("<!--")
        indented = line.startswith("    ") and (indented or not before.strip())
        if not (fenced or fence or commented or indented or stripped.startswith(("|", "#", ">", "!["))):
            yield number, line
        fenced, commented, before = fenced != fence, commented and "-->" not in stripped, line


def check_width(path: str, text: str) -> Iterator[Finding]:
    """Yields lines of prose that are wider than they should be and could be broken."""
    for number, line in prose_of_markdown(text):
        if len(line) > MARKDOWN_COLUMNS and " " in line.strip():
            yield Finding(path, number, "width", f"{len(line)} columns of at most {MARKDOWN_COLUMNS}")


def check_folders(paths: Iterable[str]) -> Iterator[Finding]:
    """Yields folders of product code with too many Python files, generated ones not counted."""
    files = (pathlib.PurePosixPath(path) for path in paths if path.endswith(".py") and path.startswith(PRODUCT))
    for folder, count in collections.Counter(str(path.parent) for path in files).items():
        if count > MOST_FILES:
            yield Finding(folder, 0, "folder", f"{count} Python files of at most {MOST_FILES}")


def check_file(path: str, text: str) -> Iterator[Finding]:
    """Yields the findings of one file, by what its name says it is."""
    if path.endswith(".py"):
        yield from check_openings(path, text)
        yield from check_words(path, words_of_code(text))
    elif path.endswith(".md"):
        yield from check_width(path, text)
        yield from check_words(path, enumerate(text.splitlines(), 1))
    else:
        yield from check_words(path, enumerate(text.splitlines(), 1))


def tracked(places: list[str]) -> list[str]:
    """The files under some places that are ours: tracked, there, and not generated."""
    listed = subprocess.run(
        ["git", "ls-files", *(places or ["."])], cwd=ROOT, capture_output=True, text=True, check=True
    )
    ours = (name for name in listed.stdout.splitlines() if name.endswith(KINDS) and "_pb2" not in name)
    return [name for name in ours if (ROOT / name).exists()]


def room_of(finding: Finding) -> str:
    """The room that a finding counts for: a package, a folder of the tests, or a top folder."""
    parts = pathlib.PurePosixPath(finding.path).parts
    folders = parts if finding.rule == "folder" else parts[:-1]
    depth = (
        2 if folders[:1] and folders[0] in ("service", "backend", "both_sides", "kernels", "clients", "tests") else 1
    )
    return "/".join(folders[:depth]) or "."


def summary(findings: list[Finding]) -> str:
    """A table of how many findings each room has, by rule."""
    rules = ("opening", "word", "width", "folder")
    counts = collections.Counter((room_of(finding), finding.rule) for finding in findings)
    rooms = sorted({room for room, _ in counts})
    lines = [f"{'room':32}" + "".join(f"{rule:>9}" for rule in rules)]
    lines += [f"{room:32}" + "".join(f"{counts[room, rule]:9}" for rule in rules) for room in rooms]
    total = "".join(f"{sum(counts[room, rule] for room in rooms):9}" for rule in rules)
    return "\n".join([*lines, f"{'all':32}{total}"])


def main() -> int:
    """Prints findings, or with `--summary` their numbers by room; returns 1 if there are any."""
    parser = argparse.ArgumentParser(description="Checks docstring openings, retired words, widths and folder sizes.")
    parser.add_argument("places", nargs="*", help="folders or files below the repository's root; all by default")
    parser.add_argument("--summary", action="store_true", help="print how many findings each room has")
    options = parser.parse_args()
    paths = tracked(options.places)
    findings = sorted(check_folders(paths))
    for path in paths:
        findings += sorted(check_file(path, (ROOT / path).read_text(encoding="utf-8")))
    print(summary(findings) if options.summary else "\n".join(map(str, findings)))
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
