"""Turns the corpus into packed token rows, in as many processes as there are cores.

Owns the row format. A shard is an array `uint16 [rows, ROW_TOKENS + 1]`; bit 15 marks a token that
the model is trained to say (assistant turns and plain texts), the low bits are its id. Documents
are never split: what does not fit starts the next row, and the rest of a row is `<|pad|>`. Shard i
depends on the seed and on i alone, so the corpus is the same whatever the number of processes.
Shards appear as files, written whole and renamed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import numpy
from corpus import training_item
from corpus_draw import Draw, Item
from numpy.typing import NDArray
from tokenizers import Tokenizer

ROW_TOKENS = 1024
SPOKEN_BIT = 1 << 15
OPEN_ROWS = 8
Row = list[int]


def shard_path(folder: Path, index: int) -> Path:
    """The path of shard `index`."""
    return folder / f"shard_{index:05d}.npy"


def _special_id(tokenizer: Tokenizer, name: str) -> int:
    found: int | None = tokenizer.token_to_id(f"<|{name}|>")
    if found is None:
        raise ValueError(f"the tokenizer has no <|{name}|>: train it with train_tokenizer.py")
    return found


class Encoder:
    """Items to token ids with the spoken bit."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = {name: _special_id(tokenizer, name) for name in ("bos", "eos", "end", "pad")}
        self.roles = {role: _special_id(tokenizer, role) for role in ("system", "user", "assistant")}
        self.roles["recited"] = self.roles["assistant"]

    def encode_many(self, items: list[Item]) -> list[Row]:
        """Encodes a batch of items; one call into the tokenizer for all their turns."""
        texts = [text for item in items for _, text in item.turns]
        encoded = iter(self.tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        return [self._assemble(item, [next(encoded).ids for _ in item.turns]) for item in items]

    def _assemble(self, item: Item, ids_of_turns: list[list[int]]) -> Row:
        row = [self.special["bos"]]
        for (role, _), ids in zip(item.turns, ids_of_turns, strict=True):
            spoken = SPOKEN_BIT if role in ("assistant", "text") else 0
            closing = self.special["eos" if role == "text" else "end"]
            if role != "text":
                row.append(self.roles[role])
            row.extend(token | spoken for token in (*ids, closing))
        return row


class RowPacker:
    """First-fit packing into a few open rows."""

    def __init__(self, pad_id: int) -> None:
        self.pad_id = pad_id
        self.open: list[Row] = []
        self.full: list[Row] = []

    def add(self, document: Row) -> None:
        """Puts the document into the first open row with room, or leaves out a longer one."""
        if len(document) > ROW_TOKENS + 1:
            return
        for row in self.open:
            if len(row) + len(document) <= ROW_TOKENS + 1:
                row.extend(document)
                return
        if len(self.open) == OPEN_ROWS:
            self._close(max(range(OPEN_ROWS), key=lambda i: len(self.open[i])))
        self.open.append(list(document))

    def _close(self, index: int) -> None:
        row = self.open.pop(index)
        self.full.append(row + [self.pad_id] * (ROW_TOKENS + 1 - len(row)))


def build_shard(encoder: Encoder, seed: int, index: int, rows: int) -> NDArray[numpy.uint16]:
    """Packs shard `index`: `[rows, ROW_TOKENS + 1]`."""
    draw = Draw(seed * 1_000_003 + index, "train")
    packer = RowPacker(encoder.special["pad"])
    while len(packer.full) < rows:
        for document in encoder.encode_many([training_item(draw) for _ in range(64)]):
            packer.add(document)
    return numpy.array(packer.full[:rows], dtype=numpy.uint16)


def write_shards(tokenizer_file: Path, folder: Path, seed: int, indices: range, rows: int) -> None:
    """Writes the shards of the given indices in order."""
    encoder = Encoder(Tokenizer.from_file(str(tokenizer_file)))
    for index in indices:
        path = shard_path(folder, index)
        partial = path.with_suffix(".partial.npy")
        numpy.save(partial, build_shard(encoder, seed, index, rows))
        partial.rename(path)


def start_writers(
    tokenizer_file: Path, folder: Path, *, seed: int, shards: int, rows: int, processes: int
) -> list[subprocess.Popen[bytes]]:
    """Starts processes that write shards 0..shards-1, low indices first; the caller ends them.

    They are processes of this file, not of the caller's: so none of them loads torch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    one_thread = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    shared = (tokenizer_file, folder, seed, shards, rows, processes)
    command = [sys.executable, __file__, *map(str, shared)]
    return [subprocess.Popen([*command, str(worker)], env=one_thread) for worker in range(processes)]


def main() -> None:
    """One writer: takes every `processes`-th shard, beginning with shard `worker`."""
    parser = argparse.ArgumentParser(description="Write packed shards of the demo corpus.")
    parser.add_argument("tokenizer_file", type=Path)
    parser.add_argument("folder", type=Path)
    for name in ("seed", "shards", "rows", "processes", "worker"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    share = range(options.worker, options.shards, options.processes)
    write_shards(options.tokenizer_file, options.folder, options.seed, share, options.rows)


if __name__ == "__main__":
    main()
