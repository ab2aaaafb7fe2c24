"""Files by name, in a folder or a .zip archive, for any number of processes and threads."""

import os
import struct
import weakref
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_SIGNATURE = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of the name and the extra field


@dataclass(frozen=True, slots=True)
class _Member:
    offset: int
    size: int
    method: int
    checksum: int


class FileStore(Protocol):
    """Where files are: names are relative, with "/" between their parts."""

    path: Path

    def names(self) -> list[str]:
        """Return the names of all files, and of folders, which end in "/"."""
        ...

    def read(self, name: str) -> bytes:
        """Return a file's content."""
        ...


def open_store(source: str | Path) -> FileStore | None:
    """Open a folder or a .zip archive; None if the source is neither."""
    path = Path(source)
    if path.is_dir():
        return FolderStore(path)
    if path.is_file() and path.suffix.lower() == ".zip":
        return ZipStore(path)
    return None


class FolderStore:
    """A folder on disk, links followed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def names(self) -> list[str]:
        """Return the names of all files and folders within."""
        found: list[str] = []
        for where, folders, files in os.walk(self.path, followlinks=True):
            inside = Path(where).relative_to(self.path).as_posix()
            prefix = "" if inside == "." else f"{inside}/"
            found.extend(f"{prefix}{name}/" for name in folders)
            found.extend(prefix + name for name in files)
        return found

    def read(self, name: str) -> bytes:
        """Return a file's content."""
        return (self.path / name).read_bytes()


class ZipStore:
    """A .zip archive: the directory is read once, members by their offset, without unpacking.

    Reads carry their own position, so processes and threads may share the one open file, and
    workers need not parse the directory again (a large one takes seconds and much memory).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with zipfile.ZipFile(self.path) as archive:
                self._members = {info.filename: _member(info) for info in archive.infolist()}
        except zipfile.BadZipFile as error:
            raise ValueError(
                f"{self.path} is no readable .zip archive ({error}); copy it again"
            ) from error
        self._open()

    def names(self) -> list[str]:
        """Return the names of all members; folders need not be among them."""
        return list(self._members)

    def read(self, name: str) -> bytes:
        """Return a member's content; raise `ValueError` when it is damaged."""
        member = self._members[name]
        header = os.pread(self._file, _LOCAL_HEADER.size, member.offset)
        signature, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        if signature != _SIGNATURE:
            raise ValueError("damaged archive: no member where the directory says")
        start = member.offset + _LOCAL_HEADER.size + name_length + extra_length
        data = os.pread(self._file, member.size, start)
        if member.method == zipfile.ZIP_DEFLATED:
            data = zlib.decompress(data, wbits=-zlib.MAX_WBITS)
        elif member.method != zipfile.ZIP_STORED:
            raise ValueError("packed with an unusual method; use deflate or store")
        if zlib.crc32(data) != member.checksum:
            raise ValueError("damaged archive: wrong checksum")
        return data

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_RDONLY)
        self._closed = weakref.finalize(self, os.close, self._file)

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "_members": self._members}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._open()


def _member(info: zipfile.ZipInfo) -> _Member:
    return _Member(info.header_offset, info.compress_size, info.compress_type, info.CRC)
