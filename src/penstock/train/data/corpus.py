"""Loads the training text; by default the Python sources of the interpreter's standard library, without a download.

Tokens are bytes. A user's own text may be a file, a folder of files, or an array of tokens on disk.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError

_CHECKED_PARTS, _CHECKED_PART = 64, 1 << 20  # parts of a large corpus in its checksum; tokens in each
_LARGEST_VOCABULARY = 1 << 24
_LIBRARY = "Python standard library"
_RAW = MappingProxyType({".bin": "<u2", ".u32": "<u4"})  # files of tokens alone
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"})
"""Parts that not every interpreter ships; they are left out, so that the corpus is the same everywhere."""


Once = Callable[[Callable[[], int]], int]
"""Returns what a function returns, which need not be called in this process."""


@dataclass(frozen=True)
class Corpus:
    """A sequence of tokens.

    Attributes:
        name: for display.
        tokens: one dimension, any integer type; may be mapped from disk.
        vocabulary: the largest token plus one, or a number above it.
        text: whether tokens are bytes of text.
    """

    name: str
    tokens: NDArray[np.integer]
    vocabulary: int
    text: bool

    @property
    def described(self) -> str:
        """Its name and its size, for display."""
        number = len(self.tokens)
        return f"{self.name}, {f'{number / 1e6:.1f} M' if number >= 100_000 else f'{number:,}'} tokens"

    @property
    def fingerprint(self) -> str:
        """The number of tokens, and a checksum of them; in a large corpus, of evenly spread parts."""
        total, step = 0, max(len(self.tokens) // _CHECKED_PARTS, _CHECKED_PART)
        for first in range(0, len(self.tokens), step):
            total = zlib.crc32(np.ascontiguousarray(self.tokens[first : first + _CHECKED_PART]).tobytes(), total)
        return f"{len(self.tokens)} tokens, {total:08x}"


def load_corpus(
    path: str | None = None,
    skip: Callable[[Path], bool] = lambda _: False,
    vocabulary: int | None = None,
    once: Once = lambda look: look(),
) -> Corpus:
    """Load the training text.

    Args:
        path: a text file, a folder (all text files that are not hidden, sorted by name), a token array (`.npy`, or
            little-endian tokens of 16 bits in a `.bin`, of 32 in a `.u32`); None for the standard library.
        skip: returns True for files of a folder to leave out.
        vocabulary: above all tokens of an array, which is then not read as a whole; samples are checked instead, when
            they are read. None to find the largest token.
        once: calls a function that reads all tokens of an array, and returns what it does; on the ranks of a job, what
            it has returned on the only one that calls it.

    Raises:
        DataError: the path does not exist, cannot be read, or holds no text.
    """
    try:
        if path is None:
            library = Path(sysconfig.get_paths()["stdlib"])
            return _bytes_corpus(_join(_sources(library, ".py", _not_shipped_everywhere), library), _LIBRARY)
        place = Path(path)
        if not path or not place.exists():
            raise DataError(
                f"there is no file or folder {path!r}; give a text file, a folder, or a .npy, .bin or .u32 of tokens"
            )
        if place.is_dir():
            files = (file for file in _sources(place, "", _hidden) if not skip(file))
            return _bytes_corpus(_join(files, place), str(place))
        if not place.is_file():
            raise DataError(
                f"{path!r} is neither a file nor a folder; give a text file, a folder, or an array of tokens"
            )
        if place.suffix == ".npy" or place.suffix in _RAW:
            return _tokens_corpus(place, vocabulary, once)
        data = place.read_bytes()
        if not _is_text(data):
            raise DataError(
                f"{path!r} is not a text file: byte {data.index(0)} is 0. Give text, or tokens in a .npy, .bin or .u32"
            )
        return _bytes_corpus(data, str(place))
    except OSError as error:
        within = f" ({error.filename})" if error.filename not in (None, path) else ""
        what = _LIBRARY if path is None else repr(path)
        raise DataError(f"cannot read {what}{within}: {error.strerror or error}") from None


def _sources(root: Path, ending: str, skip: Callable[[str], bool]) -> Iterator[Path]:
    """Yield the files below a folder, sorted, but for names to skip; folders of such names are not looked into.

    Raises:
        OSError: a folder cannot be listed; it would be taken for an empty one.
    """

    def refuse(error: OSError) -> None:
        raise error

    found: list[Path] = []
    for folder, within, names in os.walk(root, onerror=refuse):
        within[:] = [name for name in within if not skip(name)]
        found += [Path(folder, name) for name in names if name.endswith(ending) and not skip(name)]
    yield from (path for path in sorted(found) if path.is_file())


def _not_shipped_everywhere(part: str) -> bool:
    return part in SKIPPED_FOLDERS


def _hidden(part: str) -> bool:
    return part.startswith(".")


def _join(paths: Iterator[Path], root: Path) -> bytes:
    texts = []
    for path in paths:
        data = path.read_bytes()
        if _is_text(data):
            texts.append(data)
    if not texts:
        raise DataError(f"no text files in {str(root)!r}; give a text file, or a folder that holds some")
    return b"\n".join(texts)


def _is_text(data: bytes) -> bool:
    return b"\0" not in data[:4096]


def _bytes_corpus(data: bytes, name: str) -> Corpus:
    return Corpus(name, np.frombuffer(data, dtype=np.uint8), 256, text=True)


def _tokens_corpus(path: Path, vocabulary: int | None, once: Once) -> Corpus:
    """Map an array of tokens from disk; without a vocabulary it is read once, to find the largest."""
    if path.suffix == ".npy" and not _begins_as_array(path):
        raise DataError(f"cannot read tokens from {str(path)!r}: it is not an array as numpy.save writes it")
    try:
        tokens = np.load(path, mmap_mode="r") if path.suffix == ".npy" else _raw_tokens(path)
    except (ValueError, EOFError) as error:
        raise DataError(f"cannot read tokens from {str(path)!r}: {error}") from None
    if not isinstance(tokens, np.ndarray):
        raise DataError(f"{str(path)!r} holds several arrays; give one array of tokens")
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer) or not len(tokens):
        raise DataError(
            f"{str(path)!r} must hold whole numbers in one dimension; it holds {tokens.dtype} of shape {tokens.shape}"
        )
    if vocabulary is not None:
        return Corpus(str(path), tokens, vocabulary, text=False)
    return Corpus(str(path), tokens, once(partial(_look_through, path, tokens)), text=False)


def _look_through(path: Path, tokens: NDArray[np.integer]) -> int:
    """Return the largest token plus one, which takes reading all of them."""
    if np.issubdtype(tokens.dtype, np.signedinteger) and int(tokens.min()) < 0:
        raise DataError(f"{str(path)!r} holds negative tokens")
    vocabulary = int(tokens.max()) + 1
    if vocabulary > _LARGEST_VOCABULARY:
        raise DataError(
            f"{str(path)!r} holds {vocabulary - 1}, but the numbers of tokens end below {_LARGEST_VOCABULARY}; is it "
            "an array of tokens?"
        )
    return vocabulary


def _raw_tokens(path: Path) -> NDArray[np.integer]:
    kind = np.dtype(_RAW[path.suffix])
    if path.stat().st_size % kind.itemsize:
        raise ValueError(f"{path.stat().st_size} bytes are no whole number of tokens of {kind.itemsize} bytes")
    return np.memmap(path, dtype=kind, mode="r")


def _begins_as_array(path: Path) -> bool:
    """Return whether a file begins as one array or several do; numpy takes everything else for a pickle."""
    with path.open("rb") as file:
        return file.read(6).startswith((b"\x93NUMPY", b"PK"))


def unigram_entropy(train: NDArray[np.int64], held_out: NDArray[np.int64]) -> float:
    """Return the cross-entropy of held-out text under the token frequencies of the training text, in nats per token.

    A model that uses no context at all can reach it. Every token counts once more than it occurs.

    Args:
        train, held_out: how often each token occurs, (V,).
    """
    seen = train + 1
    return float(-(held_out * np.log(seen / seen.sum())).sum() / held_out.sum())
