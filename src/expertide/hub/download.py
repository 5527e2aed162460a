"""Getting files from a hub. huggingface_hub knows the hub (endpoint, token, offline mode, listing); the transfer is
ours, because it must go on after the program was killed: huggingface_hub begins anew then.

`HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` are huggingface_hub's and mean what they mean there.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from email.message import Message
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from expertide.errors import RequestError, StorageError
from expertide.hub.names import Candidate, RemoteFile
from expertide.hub.store import folder_of, part_path
from expertide.units import MIB, format_size

# Called with (what, bytes done, bytes in all).
Progress = Callable[[str, int, int], None]
_CHUNK_BYTES = 1 * MIB
_TIMEOUT_S = 30.0
# Attempts in a row that brought no byte.
_MAX_STALLS = 5
# Left free beside what is downloaded: a full disk breaks other programs.
_SPARE_BYTES = 256 * MIB


class Hub:
    """One repository on the hub.

    Args:
        wait_s: before the second attempt; doubled each time.

    Raises:
        RequestError: no such repository, or no right to see it.
        StorageError: the hub cannot be reached.
    """

    def __init__(self, repo: str, *, wait_s: float = 1.0) -> None:
        from huggingface_hub import HfApi, get_token, hf_hub_url
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        self.repo = repo
        self._wait_s = wait_s
        try:
            info = HfApi().model_info(repo, files_metadata=True, timeout=_TIMEOUT_S)
        except GatedRepoError:
            raise RequestError(f"{repo}: its owner must let you in first; ask on its page, then set HF_TOKEN") from None
        except RepositoryNotFoundError:
            raise RequestError(f"{repo}: no such model on the hub, or a private one (set HF_TOKEN)") from None
        # Whatever its transport raises: which library that is has changed before.
        except Exception as error:
            raise StorageError(f"{repo}: the hub cannot be asked: {_sentence(error)}") from None
        self.revision: str = info.sha or "main"
        self.files = [
            RemoteFile(sibling.rfilename, sibling.size or 0, sibling.lfs.sha256 if sibling.lfs else None)
            for sibling in info.siblings or ()
            if _is_safe(sibling.rfilename)
        ]
        self._url: Callable[[str], str] = lambda path: hf_hub_url(repo, path, revision=self.revision)
        token = get_token()
        self._headers: Mapping[str, str] = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._opener = urllib.request.build_opener(_Redirects)

    def head(self, file: RemoteFile, num_bytes: int) -> bytes:
        """The first bytes of a file.

        Raises:
            StorageError: the hub did not deliver.
        """
        end = min(num_bytes, file.size)
        try:
            with self._open(file, f"bytes=0-{end - 1}") as response:
                return bytes(response.read(end))
        except (OSError, http.client.HTTPException) as error:
            raise StorageError(f"{self.repo}: {file.path}: cannot be read: {_sentence(error)}") from None

    def missing_bytes(self, candidate: Candidate) -> int:
        """What is still to come."""
        return sum(self._missing(file) for file in candidate.files)

    def check_space(self, candidate: Candidate) -> None:
        """
        Raises:
            StorageError: the disk has no room for what is missing.
        """
        folder = folder_of(self.repo)
        wanted = self.missing_bytes(candidate)
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if wanted and free < wanted + _SPARE_BYTES:
            raise StorageError(
                f"{candidate.first}: {format_size(wanted)} are missing, {existing} has {format_size(free)} free "
                f"({format_size(_SPARE_BYTES)} must stay free; XDG_CACHE_HOME names another place)"
            )

    def fetch(self, candidate: Candidate, progress: Progress) -> Path:
        """Get every file of a model, go on where an earlier call broke off, check; the first one's path.

        Raises:
            StorageError: no room, no connection, or other bytes than the hub promises.
        """
        self.check_space(candidate)
        for file in candidate.files:
            self._fetch_file(file, progress)
        return folder_of(self.repo) / candidate.first

    def _missing(self, file: RemoteFile) -> int:
        target = folder_of(self.repo) / file.path
        if _size_of(target) == file.size:
            return 0
        return file.size - min(file.size, _size_of(part_path(target, file)) or 0)

    def _fetch_file(self, file: RemoteFile, progress: Progress) -> None:
        target = folder_of(self.repo) / file.path
        # What has its own name was checked when it got it.
        if _size_of(target) == file.size:
            return
        if file.sha256 is None:
            raise StorageError(f"{self.repo}: {file.path}: the hub names no SHA-256 to check it by")
        part = part_path(target, file)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._transfer(file, part, progress)
            self._verify(file, part, progress)
            part.replace(target)
        except OSError as error:
            raise StorageError(f"{part}: cannot be written: {error.strerror or error}") from None

    def _transfer(self, file: RemoteFile, part: Path, progress: Progress) -> None:
        num_stalls = 0
        with part.open("ab") as out:
            if out.tell() > file.size:
                out.truncate(0)
                out.seek(0)
            while (before := out.tell()) < file.size:
                why = self._some(file, out, progress)
                num_stalls = 0 if out.tell() > before else num_stalls + 1
                if num_stalls >= _MAX_STALLS:
                    raise StorageError(
                        f"{self.repo}: {file.path}: got {out.tell():,} of {file.size:,} bytes: {why} "
                        "(the same command goes on from there)"
                    )
                if out.tell() < file.size:
                    time.sleep(self._wait_s * 2**num_stalls)
            out.flush()
            os.fsync(out.fileno())

    def _some(self, file: RemoteFile, out: IO[bytes], progress: Progress) -> str:
        """Append what one connection brings; why it ended."""
        start = out.tell()
        try:
            with self._open(file, f"bytes={start}-") as response:
                if start and response.status != 206:
                    # The whole file comes; what is here already is read over.
                    _skip(response, start)
                elif start and not str(response.headers.get("Content-Range", "")).startswith(f"bytes {start}-"):
                    return f"asked from byte {start:,}, got {response.headers.get('Content-Range')!r}"
                while data := response.read(_CHUNK_BYTES):
                    if out.tell() + len(data) > file.size:
                        return "the hub sends more than it promises"
                    _write(out, data)
                    progress("downloading", out.tell(), file.size)
            return "the connection ended early"
        except urllib.error.HTTPError as error:
            if error.code in (401, 403, 404, 410):
                raise StorageError(f"{self.repo}: {file.path}: the hub says {error.code} {error.reason}") from None
            return f"the hub says {error.code} {error.reason}"
        except http.client.IncompleteRead as error:
            # What had arrived before the break counts.
            if out.tell() + len(error.partial) <= file.size:
                _write(out, error.partial)
            return "the connection ended early"
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, _WriteFailedError):
                raise
            return _sentence(error)

    def _verify(self, file: RemoteFile, part: Path, progress: Progress) -> None:
        digest, done = hashlib.sha256(), 0
        with part.open("rb") as data:
            while piece := data.read(8 * MIB):
                digest.update(piece)
                done += len(piece)
                progress("checking", done, file.size)
        if digest.hexdigest() != file.sha256:
            part.unlink()
            raise StorageError(
                f"{self.repo}: {file.path}: other bytes arrived than the hub promises: SHA-256 "
                f"{digest.hexdigest()[:12]}…, expected {str(file.sha256)[:12]}…; they are deleted, pull again"
            )

    def _open(self, file: RemoteFile, byte_range: str) -> Any:
        headers = {**self._headers, "Range": byte_range, "Accept-Encoding": "identity"}
        return self._opener.open(urllib.request.Request(self._url(file.path), headers=headers), timeout=_TIMEOUT_S)


class _WriteFailedError(OSError):
    """Our disk, not the connection."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; the token stays with the host it is for."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        following = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        if following is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            with contextlib.suppress(KeyError):
                del following.headers["Authorization"]
        return following


def _write(out: IO[bytes], data: bytes) -> None:
    try:
        out.write(data)
        out.flush()
    except OSError as error:
        raise _WriteFailedError(error.errno, error.strerror) from None


def _skip(response: Any, num_bytes: int) -> None:
    while num_bytes and (data := response.read(min(num_bytes, _CHUNK_BYTES))):
        num_bytes -= len(data)


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _is_safe(path: str) -> bool:
    """Whether a path from the hub stays inside its folder."""
    parts = path.split("/")
    return bool(path) and not path.startswith("/") and "\\" not in path and not {"", ".", ".."} & set(parts)


def _sentence(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or error
    lines: Sequence[str] = str(reason).splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
