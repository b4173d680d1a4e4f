"""Images that are files of the worker's machine: only below folders that the settings name.

A path may hold symbolic links, as long as the file that they lead to lies below the same folder. Each part of that
file's own path is opened without following links, so a link that is exchanged a moment later changes nothing.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from penstock.schemas.errors import InvalidRequest, PenstockError, SourceUnavailable, TooLarge

_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})


class ImageFolders:
    """Reads files. `folders`: where each folder lies on this machine, by the path that requests have for it."""

    def __init__(self, folders: Mapping[str, Path], *, max_bytes: int) -> None:
        by_path = {PurePosixPath(named): folder for named, folder in folders.items()}
        # The innermost first: another may lie around it.
        self._folders = dict(sorted(by_path.items(), key=lambda one: -len(one[0].parts)))
        self._max_bytes = max_bytes

    def read(self, url: str, *, param: str) -> bytes:
        """The bytes of a `file:` URL. Blocks. Raises, naming `param`: InvalidRequest, TooLarge, SourceUnavailable."""
        folder, inner = self._place(url, param)
        try:
            root = os.path.realpath(folder)
            found = os.path.realpath(os.path.join(root, *inner.parts))
            if not PurePosixPath(found).is_relative_to(root):
                raise _outside(param)
            return self._content(root, PurePosixPath(found).relative_to(root), param)
        except OSError as error:
            raise _refusal(error, param) from error

    def _place(self, url: str, param: str) -> tuple[Path, PurePosixPath]:
        """(the folder, the path below it)."""
        if not self._folders:
            raise InvalidRequest(
                f"{param}: images are not read from files here: images.folders is empty; upload the image to"
                " /v1/artifacts, and name its artifact_id",
                param=param,
            )
        try:
            parts = urlsplit(url)
            path = unquote(parts.path, errors="strict")
        except ValueError:
            raise InvalidRequest(f"{param} is not the URL of a file", param=param) from None
        if parts.netloc.lower() not in ("", "localhost") or parts.query or parts.fragment or "\0" in path:
            raise InvalidRequest(f"{param} is not the path of a file on the worker's machine", param=param)
        named = PurePosixPath(path)
        if ".." in named.parts:
            raise _outside(param)
        for prefix, folder in self._folders.items():
            if named != prefix and named.is_relative_to(prefix):
                return folder, named.relative_to(prefix)
        raise _outside(param)

    def _content(self, root: str, inner: PurePosixPath, param: str) -> bytes:
        with ExitStack() as opened:
            here: int | None = None
            for part in (root, *inner.parts[:-1]):
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                here = os.open(part, flags, dir_fd=here)
                opened.callback(os.close, here)
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe is not waited for
            with open(os.open(inner.name, flags, dir_fd=here), "rb") as file:
                about = os.fstat(file.fileno())
                if not stat.S_ISREG(about.st_mode):
                    raise InvalidRequest(f"{param} is not a file", param=param)
                data = file.read(self._max_bytes + 1) if about.st_size <= self._max_bytes else None
        if data is None or len(data) > self._max_bytes:
            raise TooLarge(
                f"{param} has more than {self._max_bytes} bytes", param=param, details={"limit_bytes": self._max_bytes}
            )
        return data


def _outside(param: str) -> InvalidRequest:
    """The same whether the file exists or not."""
    return InvalidRequest(f"{param} lies in no folder that images may come from (images.folders)", param=param)


def _refusal(error: OSError, param: str) -> PenstockError:
    if error.errno in _NOT_THERE:
        return InvalidRequest(f"{param}: there is no such file on the worker's machine", param=param)
    if error.errno in _FORBIDDEN:
        return InvalidRequest(f"{param}: the worker may not read this file", param=param)
    if error.errno == errno.EISDIR:
        return InvalidRequest(f"{param} is not a file", param=param)
    return SourceUnavailable(f"{param}: the file cannot be read now ({error.strerror})", param=param)
