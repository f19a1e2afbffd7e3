"""Files of a run: only regular ones are opened, links are not followed, and what is read has a limit."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

_BLOCK = 1 << 20  # bytes per read when hashing
_LINK = "it is a symbolic link, which is not followed; put the file itself there"


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: str = "rb") -> BinaryIO:
    """Open a regular file.

    Args:
        path: where it is; folders on the way may be links, the file may not.
        flags: of `os.open`.
        mode: of the file object.

    Raises:
        OSError: it cannot be opened, or it is a link, a pipe, a device or a folder, which the message says.
    """
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, _LINK, str(path)) from None
        raise
    try:
        kind = os.fstat(handle).st_mode
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, f"it is a {_kind(kind)}, not a regular file", str(path))
        return os.fdopen(handle, mode)  # type: ignore[return-value]
    except BaseException:
        os.close(handle)
        raise


def check_regular(path: Path) -> None:
    """Make sure that a path is a regular file and no link.

    Raises:
        OSError: it is missing, or something else, which the message says.
    """
    open_regular(path).close()


def check_own_folder(path: Path) -> None:
    """Make sure that a folder, if there is one, is no link to another one, so that nothing is written elsewhere.

    Raises:
        OSError: it is a link, or no folder.
    """
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(kind):
        raise OSError(
            errno.ELOOP, "it is a symbolic link, which is not followed; put the folder itself there", str(path)
        )
    if not stat.S_ISDIR(kind):
        raise OSError(errno.ENOTDIR, f"it is a {_kind(kind)}, not a folder", str(path))


def read_text(path: Path, most: int) -> str:
    """Read a file of at most so many bytes.

    Raises:
        OSError: it cannot be read or is no regular file.
        ValueError: it is larger, or not text in UTF-8.
    """
    with open_regular(path) as file:
        return _limited(file, most, f"{most} bytes").decode()


def read_given(path: Path, most: int = 1 << 28) -> str:
    """Read a file that a user has named, of any kind, such as the output of another command.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than `most` bytes, not text in UTF-8, or its name cannot be.
    """
    with path.open("rb") as file:
        return _limited(file, most, f"{most >> 20} MiB").decode()


def read_json(path: Path, most: int) -> Any:
    """Read a JSON file of at most so many bytes.

    Raises:
        OSError: it cannot be read or is no regular file.
        ValueError: it is larger, or not JSON, or nested too deep.
    """
    return parse_json(read_text(path, most))


def parse_json(text: str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: it is not JSON, or nested too deep, or holds a number of too many digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def fingerprint(path: Path) -> dict[str, Any]:
    """Return the size and SHA-256 of a file.

    Raises:
        OSError: it cannot be read or is no regular file.
    """
    digest = hashlib.sha256()
    with open_regular(path) as file:
        for block in _blocks(file):
            digest.update(block)
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest.hexdigest()}


def make_own_folder(path: Path) -> None:
    """Make a folder, and those that it lies in, unless it is there.

    Raises:
        OSError: it cannot be made, or what is there is a link or no folder.
    """
    path.mkdir(parents=True, exist_ok=True)
    check_own_folder(path)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file in such a way that it has its name only once it is complete; a file that had the name is replaced.

    Raises:
        OSError: it cannot be written, or what has the name is a link or no regular file.
    """
    with new_file(path) as temporary, open_regular(temporary, os.O_WRONLY, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield the name under which to write a file, which gets its own once it is complete and on the disk.

    If it cannot be written nothing of it is left, as its room may be needed to say so. It has the permissions that the
    umask leaves any new file: a library that renames a temporary one would leave those of temporary files.

    Raises:
        OSError: it cannot be written, or what has the name is a link or no regular file.
    """
    if os.path.lexists(path):
        check_regular(path)
    temporary = path.with_name(f".{zlib.crc32(os.fsencode(path.name)):08x}.{os.getpid()}.part")  # never too long
    temporary.unlink(missing_ok=True)  # from a process that was killed
    try:
        with open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, "wb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        yield temporary
        temporary.chmod(mode)
        sync_file(temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def append_line(path: Path, line: str) -> None:
    """Append a line of text, all at once; behind the rest of a line that was cut, it begins on a new one.

    Raises:
        OSError: it cannot be written, or the file is no regular one.
    """
    with open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        cut = size and os.pread(file.fileno(), 1, size - 1) != b"\n"
        os.write(file.fileno(), (b"\n" if cut else b"") + line.encode() + b"\n")


def sync_file(path: Path) -> None:
    """Flush a file to the disk."""
    with open_regular(path) as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _limited(file: BinaryIO, most: int, limit: str) -> bytes:
    """Return what is in a file.

    Raises:
        ValueError: it is larger than `most` bytes.
    """
    found = bytearray()
    for block in _blocks(file):  # `read(most)` would take as much memory, whatever is in the file
        found += block
        if len(found) > most:
            raise ValueError(f"it is larger than {limit}")
    return bytes(found)


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(_BLOCK):
        yield block


def _kind(mode: int) -> str:
    """Return what a path is, in words."""
    kinds = {stat.S_IFIFO: "pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device", stat.S_IFSOCK: "socket"}
    return (kinds | {stat.S_IFDIR: "folder", stat.S_IFREG: "file"}).get(stat.S_IFMT(mode), "special file")
