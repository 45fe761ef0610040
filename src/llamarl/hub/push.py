"""Uploads a folder of files to the hub in one commit: all of them appear at once, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamarl.config.hub_names import HubName, name_on_hub, parse_hub_name
from llamarl.errors import InputError
from llamarl.hub.client import bars_on_terminals_only, endpoint, is_offline, load_client, one_line_errors, tell

README = "README.md"
_KEPT_OUT = (".cache", ".git")

MakeCard = Callable[[str, Sequence[str], str], str]  # name on the hub, files, license of the base -> README.md


def push_folder(folder: Path, name: str, *, public: bool, base: str = "", card: MakeCard | None = None) -> str:
    """Upload a folder and return its address. `base`: the model it was trained from, whose license the card repeats. Without
    a card, the folder's own README.md is what there is."""
    files = _files(folder)
    if is_offline():
        raise InputError("push: HF_HUB_OFFLINE is set, so nothing can be uploaded")
    if name.count("/") > 1 or "@" in name or not parse_hub_name(name if "/" in name else f"own/{name}"):
        raise InputError(f"push: {name} is no name for the hub; expected ORG/NAME or NAME")
    asked = parse_hub_name(name) or HubName(name)
    client = load_client("push", asked)
    with one_line_errors("push", asked, "model", "uploaded"):
        api = client.HfApi(endpoint=endpoint(), library_name="llamarl")
        _check_token(client, api)
        repo, made = _open_repo(client, api, name, public=public)
        text = card(repo, files, _license_of(api, base)) if card else ""
        try:
            _commit(client, api, repo, folder, files, text)
        except BaseException:
            if made:
                _delete_if_empty(api, repo)
            raise
    return f"{endpoint()}/{repo}"


def _delete_if_empty(api: Any, repo: str) -> None:
    """Take back a repository that was made for an upload which failed."""
    with suppress(Exception):
        if set(api.list_repo_files(repo)) <= {".gitattributes"}:
            api.delete_repo(repo)


def _files(folder: Path) -> list[str]:
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    kept = [file for file in found if file.split("/")[0] not in _KEPT_OUT]
    if not kept:
        raise InputError(f"push: {folder} holds no files")
    return kept


def _check_token(client: Any, api: Any) -> None:
    if client.get_token() is None:
        raise InputError("push: to upload, set HF_TOKEN to a token that may write, or run `hf auth login`")
    api.whoami()


def _open_repo(client: Any, api: Any, name: str, *, public: bool) -> tuple[str, bool]:
    """The full name of the repository, and whether it was made here. One that others can see is never written unasked."""
    try:
        url = api.create_repo(name, private=not public)
        return str(url.repo_id), True
    except client.errors.HfHubHTTPError as error:
        if getattr(error.response, "status_code", 0) != 409:
            raise
    found = api.repo_info(name if "/" in name else f"{api.whoami()['name']}/{name}", repo_type="model")
    if not public and not found.private:
        raise InputError(f"push: {found.id} is public on the hub; add --public to upload to it, or take another name")
    return str(found.id), False


def _license_of(api: Any, base: str) -> str:
    """License of the base model, as its card says; empty: unknown."""
    name = name_on_hub(base) if base else None
    if name is None:
        return ""
    with suppress(Exception):  # a card is complete without it, and says so
        data = api.model_info(name.repo, revision=name.revision or None).card_data
        return str((data.to_dict() if data else {}).get("license") or "")
    return ""


def _commit(client: Any, api: Any, repo: str, folder: Path, files: Sequence[str], card: str) -> None:
    names = [file for file in files if not (card and file == README)]
    total = sum((folder / file).stat().st_size for file in names)
    tell(f"uploading {len(names)} files, {total / 1e6:.1f} MB, to {endpoint()}/{repo}")
    operations = [client.CommitOperationAdd(file, str(folder / file)) for file in names]
    if card:
        operations.append(client.CommitOperationAdd(README, card.encode()))
    with bars_on_terminals_only(client):
        api.create_commit(repo, operations=operations, commit_message="Upload by llamarl push")
