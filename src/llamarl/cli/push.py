"""`llamarl push`: upload the policy of a run to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from llamarl.errors import InputError


def push_command(
    run: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="a run folder, or any folder with a model or an adapter in it")
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="name on the hub: ORG/NAME, or NAME of your own")],
    public: Annotated[bool, typer.Option("--public", help="let everybody see it; without it, only you can")] = False,
    version: Annotated[
        int, typer.Option(min=-1, help="version of the run's policy; default: its newest whole snapshot")
    ] = -1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the card, and upload nothing")] = False,
) -> None:
    """Upload a run's policy, or its adapter, to the Hugging Face Hub, with a card that says how it was made."""
    from llamarl.hub.card import make_card, read_run
    from llamarl.hub.push import push_folder
    from llamarl.observe.run_folder import CONFIG

    if not run.is_dir():
        raise InputError(f"{run}: no such folder")
    if not (run / CONFIG).is_file():
        if version >= 0:
            raise InputError(f"--version: {run} is no run folder, so it has no versions")
        if dry_run:
            raise InputError(f"--dry-run: {run} is no run folder, so no card is made for it")
        print(f"pushed to {push_folder(run, name, public=public)}")
        return
    number, folder = _policy(run, version)
    facts = read_run(run, number)

    def card(repo: str, files: Sequence[str], license_name: str) -> str:
        return make_card(repo, facts, files, license_name)

    if dry_run:
        print(card(name, sorted(path.name for path in folder.iterdir()), ""), end="")
        return
    print(f"pushed to {push_folder(folder, name, public=public, base=facts.config.model.path, card=card)}")


def _policy(run: Path, version: int) -> tuple[int, Path]:
    """Version and folder of the policy in a whole snapshot."""
    from llamarl.engine.snapshot_store import SnapshotStore
    from llamarl.model.training_state import POLICY
    from llamarl.observe.run_folder import SNAPSHOTS

    snapshots = SnapshotStore(run / SNAPSHOTS, keep=1)
    made = snapshots.versions()
    if version >= 0 and version not in made:
        known = ", ".join(map(str, made)) or "none"
        raise InputError(f"--version {version}: {run} has no snapshot of it; there are: {known}")
    found, problems = snapshots.newest_whole(among=range(version, version + 1) if version >= 0 else None)
    if not found:
        told = f": {problems[0]}" if problems else "; a policy is in it after snapshots.every updates, and at the end"
        raise InputError(f"{run}: has no whole snapshot{told}")
    return found, snapshots.path(found) / POLICY
