"""Byte-level language modelling over any files.

In: files and folders, or nothing for the Python standard library's sources. Out: batches of token ids 0 to 255, each a
pure function of (seed, step): a run resumes by its step alone.

    corpus = ByteCorpus()
    batch = corpus.batch(step=7, batch=16, length=128, seed=0)         # {"inputs", "targets"}, [16, 128] int32
"""

import copy
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from meshes.errors import ShardingError
from shardlib.data.text_files import standard_library, text_files


class ByteCorpus:
    """Files as one row of bytes, a zero byte after each but the last.

    Window w of length T has the inputs at wT .. wT + T - 1 and the targets one byte later, so that every byte but the
    first is a target once per epoch; fewer than T bytes at the end are left out. Windows come in a fresh permutation
    each epoch, and a batch may span two epochs.

    Args:
        paths: files and folders, as in `text_files`; None for `standard_library`.

    Attributes:
        files: the files read, in order.
        num_bytes: their sizes and the separators.

    Raises:
        ShardingError: a path that is missing, unreadable or empty, or a folder without text.
    """

    vocab = 256

    def __init__(self, paths: Iterable[str | os.PathLike[str]] | None = None):
        self.files = standard_library() if paths is None else text_files(paths)
        self._data = np.memmap(self.files[0], mode="r") if len(self.files) == 1 else _joined(self.files)
        self.num_bytes = len(self._data)
        self._permutation = functools.lru_cache(maxsize=2)(_permutation)

    def __repr__(self) -> str:
        return f"ByteCorpus({len(self.files):,} files, {self.num_bytes:,} bytes)"

    def num_windows(self, length: int) -> int:
        """How many windows of `length` tokens make an epoch.

        Raises:
            ShardingError: when there is not even one.
        """
        if length < 1:
            raise ShardingError(f"length {length} is not positive")
        windows = (self.num_bytes - 1) // length
        if windows == 0:
            where = str(self.files[0]) if len(self.files) == 1 else f"{len(self.files)} files"
            raise ShardingError(
                f"the training data ({where}) has {self.num_bytes:,} bytes, fewer than the {length + 1:,} that "
                f"one window takes: {length:,} tokens and the target of the last",
                fix=f"name more data, or choose a length of at most {max(self.num_bytes - 1, 1):,}",
            )
        return windows

    def epoch(self, step: int, *, batch: int, length: int) -> int:
        """The epoch, from 0, that the first window of this step belongs to."""
        return step * batch // self.num_windows(length)

    def batch(self, step: int, *, batch: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
        """The batch of one step.

        Args:
            step: from 0.
            batch: number of windows.
            length: tokens per window.
            seed: a non-negative integer; it decides the order of the windows.

        Returns:
            {"inputs", "targets"}, each [batch, length] int32.

        Raises:
            ShardingError: when the corpus is shorter than one window, or an argument is out of range.
        """
        if step < 0 or batch < 1 or seed < 0:
            raise ShardingError(f"step={step} and seed={seed} must be at least 0, batch={batch} at least 1")
        num_windows = self.num_windows(length)
        epochs, ranks = np.divmod(np.arange(step * batch, (step + 1) * batch), num_windows)
        windows = np.empty(batch, np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            windows[here] = self._permutation(num_windows, seed, int(epoch))[ranks[here]]
        return self._windows(windows, length)

    def split(self, *, length: int, held_out: int) -> "tuple[ByteCorpus, ByteCorpus]":
        """Two corpora without a common window: all but the last `held_out` windows of this length, and those.

        Raises:
            ShardingError: when not even one window is left to train on.
        """
        cut = self.num_bytes - 1 - held_out * length
        if cut < length + 1:
            raise ShardingError(
                f"the training data has {self.num_windows(length):,} windows of {length:,}; {held_out} are held out",
                fix="name more data, choose a shorter length, or do not evaluate",
            )
        return self._part(slice(0, cut)), self._part(slice(cut, None))

    def in_order(self, *, batch: int, length: int) -> Iterator[dict[str, np.ndarray]]:
        """Every window once, in the order of the text; the last batch may be short."""
        windows = np.arange(self.num_windows(length))
        for first in range(0, len(windows), batch):
            yield self._windows(windows[first : first + batch], length)

    def _windows(self, windows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        tokens = self._data[windows[:, None] * length + np.arange(length + 1)[None, :]].astype(np.int32)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def _part(self, part: slice) -> "ByteCorpus":
        made = copy.copy(self)
        made._data = self._data[part]
        made.num_bytes = len(made._data)
        return made


def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    # RandomState, not Generator: NumPy keeps its stream fixed over versions (NEP 19), and a run must resume anywhere.
    words = [word & 0xFFFFFFFF for word in (seed, seed >> 32, epoch)]
    return np.random.RandomState(words).permutation(count)


def _joined(files: Sequence[Path]) -> np.ndarray:
    sizes = [file.stat().st_size for file in files]
    data = np.zeros(sum(sizes) + len(files) - 1, np.uint8)
    start = 0
    for file, size in zip(files, sizes, strict=True):
        with file.open("rb") as stream:
            if stream.readinto(data[start : start + size].data) != size:
                raise ShardingError(f"{file} changed while it was read", fix="run again when nothing writes to it")
        start += size + 1
    return data
