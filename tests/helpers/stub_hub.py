"""A small Hugging Face Hub on loopback, for the real client: repositories with commits, files, gates, faults and uploads."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_LARGE = 10_000  # bytes from which a file is stored as LFS, behind a redirect
_RESOLVE = re.compile(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/([a-z]+)(?:/([^/]+))?(?:/(.*))?)?")


@dataclass
class StubRepo:
    """One repository: its commits, and which one each branch or tag stands for."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    license: str = ""

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Add a commit with exactly these files."""
        sha = hashlib.sha1(repr((sorted(files.items()), len(self.commits))).encode()).hexdigest()
        self.commits[sha] = files
        self.refs[ref] = sha
        return sha

    def find(self, revision: str) -> str | None:
        found = self.refs.get(revision, revision)
        return found if found in self.commits else None


@dataclass
class StubHub:
    """The state of the hub. Tests change it between requests."""

    url: str = ""
    storage_url: str = ""  # another host, which large files are redirected to; tokens must not reach it
    models: dict[str, StubRepo] = field(default_factory=dict)
    datasets: dict[str, StubRepo] = field(default_factory=dict)
    token: str = ""  # the only valid one; empty: none is needed
    seen: list[str] = field(default_factory=list)  # "GET /path" of every request so far
    tokens: set[str] = field(default_factory=set)  # those that requests carried
    leaked: set[str] = field(default_factory=set)  # those that reached the storage's host
    cut_short: str = ""  # name of a file whose download ends after half of it
    status: int = 0  # answer every request with this error
    full: bool = False  # refuse uploads for lack of room
    blobs: dict[str, bytes] = field(default_factory=dict)  # LFS objects that were uploaded

    def model(self, name: str, files: dict[str, bytes] | Path, **settings: Any) -> StubRepo:
        return self._add(self.models, name, files, settings)

    def dataset(self, name: str, files: dict[str, bytes] | Path, **settings: Any) -> StubRepo:
        return self._add(self.datasets, name, files, settings)

    def _add(
        self, where: dict[str, StubRepo], name: str, files: dict[str, bytes] | Path, settings: dict[str, Any]
    ) -> StubRepo:
        if isinstance(files, Path):
            files = {str(path.relative_to(files)): path.read_bytes() for path in files.rglob("*") if path.is_file()}
        where[name] = StubRepo(**settings)
        where[name].commit(files)
        return where[name]

    def downloads(self) -> list[str]:
        """Names of the files whose content was asked for, in order."""
        found = [re.search(r"GET .*/(?:resolve/[^/]+|lfs-objects/[0-9a-f]+)/([^?]+)", line) for line in self.seen]
        return [match[1] for match in found if match]


@contextmanager
def stub_hub() -> Iterator[StubHub]:
    """Serve a hub at its `url` inside the `with` block."""
    hub = StubHub()

    class Handler(_Handler):
        state = hub

    servers = [ThreadingHTTPServer((address, 0), Handler) for address in ("127.0.0.1", "127.0.0.2")]
    hub.url, hub.storage_url = (f"http://{server.server_address[0]!s}:{server.server_port}" for server in servers)
    for server in servers:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: StubHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self._body = self.rfile.read(length) if length else b""
        hub, self._path = self.state, unquote(urlsplit(self.path).path)
        hub.seen.append(f"{self.command} {self._path}")
        self._token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._token:
            hub.tokens.add(self._token)
        if self._path.startswith("/lfs-objects/") and self.command == "GET":
            hub.leaked |= {self._token} - {""}
        if hub.status:
            return self._error(hub.status, "")
        if self._path.startswith("/lfs-objects/"):
            return self._lfs_object()
        if self._path.endswith("/info/lfs/objects/batch"):
            return self._lfs_batch()
        if self._path == "/api/repos/create":
            return self._create()
        if self._path == "/api/repos/delete":
            return self._delete()
        if self._path == "/api/whoami-v2":
            return self._whoami()
        if self._path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if found := _RESOLVE.fullmatch(self._path):
            return self._resolve(*found.groups())
        if found := _API.fullmatch(self._path):
            return self._api(*found.groups())
        return self._error(404, "")

    # Answers

    def _json(self, value: Any, status: int = 200, **headers: str) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **headers})

    def _error(self, status: int, code: str, told: str = "") -> None:
        self._json({"error": told or code}, status, **{"X-Error-Code": code, "X-Error-Message": told or code})

    def _send(self, status: int, data: bytes, headers: dict[str, str], *, shown: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if shown is None else shown))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        if shown is not None and shown != len(data):
            self.close_connection = True

    # Who may see what

    def _repo(self, kind: str, name: str) -> StubRepo | None:
        """The repository, if this request may see it; otherwise it is answered here."""
        hub = self.state
        repo = (hub.datasets if kind == "datasets" else hub.models).get(name)
        allowed = bool(hub.token) and self._token == hub.token
        if self._token and hub.token and not allowed:
            self._error(401, "", "Invalid credentials in Authorization header")
        elif repo is None or (repo.private and not allowed):
            self._error(404 if self._token else 401, "RepoNotFound", "Repository not found")
        elif repo.gated and not allowed:
            self._error(403 if self._token else 401, "GatedRepo", "Access to this repository is restricted")
        else:
            return repo
        return None

    def _api(self, kind: str, name: str, verb: str | None, revision: str | None, rest: str | None) -> None:
        repo = self._repo(kind, name)
        if repo is None:
            return
        if verb in ("preupload", "commit") and self.command == "POST":
            return self._preupload() if verb == "preupload" else self._commit(repo, name, revision or "main")
        sha = repo.find(revision or "main")
        if sha is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repo.commits[sha]
        if verb == "tree":
            return self._json([_entry(path, data) for path, data in sorted(files.items())])
        card = {"license": repo.license} if repo.license else {}
        info = {"id": name, "modelId": name, "sha": sha, "private": repo.private, "tags": [], "cardData": card}
        info |= {"siblings": [{"rfilename": path, "size": len(data)} for path, data in sorted(files.items())]}
        return self._json(info)

    def _resolve(self, kind: str | None, name: str, revision: str, path: str) -> None:
        repo = self._repo(kind or "models", name)
        if repo is None:
            return None
        sha = repo.find(revision)
        if sha is None:
            return self._error(404, "RevisionNotFound")
        data = repo.commits[sha].get(path)
        if data is None:
            return self._error(404, "EntryNotFound")
        digest = hashlib.sha256(data).hexdigest()
        headers = {"X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if len(data) < _LARGE:
            return self._content(path, data, headers | {"ETag": f'"{digest[:40]}"'})
        self.state.blobs[digest] = data
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        headers["Location"] = f"{self.state.storage_url}/lfs-objects/{digest}/{path}"
        return self._send(302, b"", headers)

    def _content(self, path: str, data: bytes, headers: dict[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        status, shown = 200, len(data)
        if asked:
            start, total = int(asked[1]), len(data)
            data, status = data[start : int(asked[2]) + 1 if asked[2] else total], 206
            headers = headers | {"Content-Range": f"bytes {start}-{total - 1}/{total}"}
            shown = len(data)
        if self.command == "GET" and path == self.state.cut_short:
            data = b"" if asked else data[: len(data) // 2]
        self._send(status, data, headers, shown=shown)

    # Uploads

    def _lfs_object(self) -> None:
        _, _, digest, path = self._path.split("/", 3)
        if self.command == "PUT":
            if self.state.full:
                return self._error(507, "", "no room")
            self.state.blobs[digest] = self._body
            return self._json({})
        data = self.state.blobs[digest]
        return self._content(path, data, {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"})

    def _lfs_batch(self) -> None:
        objects = json.loads(self._body)["objects"]
        found = [
            {**one, "actions": {"upload": {"href": f"{self.state.storage_url}/lfs-objects/{one['oid']}/upload"}}}
            for one in objects
        ]
        self._json({"transfer": "basic", "objects": found})

    def _whoami(self) -> None:
        if not self._token or (self.state.token and self._token != self.state.token):
            return self._error(401, "", "Invalid credentials in Authorization header")
        return self._json({"type": "user", "name": "ann", "orgs": [], "auth": {"type": "access_token"}})

    def _create(self) -> None:
        asked, hub = json.loads(self._body), self.state
        if not self._token or (hub.token and self._token != hub.token):
            return self._error(401, "", "Invalid credentials in Authorization header")
        name = f"{asked.get('organization') or 'ann'}/{asked['name']}"
        where = hub.datasets if asked.get("type") == "dataset" else hub.models
        if name in where:
            return self._json({"error": "exists", "url": f"{hub.url}/{name}"}, 409)
        private = asked.get("private") is True or asked.get("visibility") == "private"
        where[name] = StubRepo(private=private)
        where[name].commit({".gitattributes": b""})
        return self._json({"url": f"{hub.url}/{name}", "name": name})

    def _delete(self) -> None:
        asked = json.loads(self._body)
        self.state.models.pop(f"{asked.get('organization') or 'ann'}/{asked['name']}")
        self._json({})

    def _preupload(self) -> None:
        files = json.loads(self._body)["files"]
        found = [
            {"path": one["path"], "uploadMode": "lfs" if one["size"] >= _LARGE else "regular", "shouldIgnore": False}
            for one in files
        ]
        self._json({"files": found})

    def _commit(self, repo: StubRepo, name: str, revision: str) -> None:
        sha = repo.find(revision)
        files = dict(repo.commits[sha]) if sha else {}
        for line in self._body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.state.blobs[value["oid"]]
            elif entry["key"] == "deletedFile":
                files.pop(value["path"], None)
        made = repo.commit(files, revision)
        self._json({"commitUrl": f"{self.state.url}/{name}/commit/{made}", "commitOid": made, "success": True})


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    if len(data) >= _LARGE:
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry
