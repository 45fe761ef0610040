"""When snapshots are taken, which parts of them are written, and which one an executor comes back from.

One snapshot at a time. The role that is the first to make a version that is due begins it; the others save their part when
they make the same version. A snapshot that falls due while another is being written is left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from llamarl.config import SnapshotsConfig
from llamarl.controller.version_policy import VersionPolicy


class SnapshotSchedule:
    def __init__(self, settings: SnapshotsConfig, policy: VersionPolicy) -> None:
        self.settings, self._policy = settings, policy
        self.saved = 0  # the newest whole snapshot of a visible version; 0 is the model that the job began with
        self.version: int | None = None  # the version that is being saved
        self._to_save: set[str] = set()  # roles that must save their part before they train on
        self._saving: set[str] = set()
        self._parts: dict[str, int] = {}  # role -> version of its written part, until the snapshot is committed
        self._committing = False
        self._given_up: set[int] = (
            set()
        )  # versions whose commit was under way when a role died; its answer is still to come
        self._unseen: set[int] = set()  # whole snapshots of versions that are not visible yet

    def resume(self, version: int) -> None:
        self.saved = version

    def made(self, role: str, reached: Mapping[str, int]) -> None:
        """The role has made its next version. `reached` holds the version that each role is at."""
        version = reached[role]
        if self.version is None and self._is_due(version) and self._will_be_whole(role, reached):
            self._begin(version)
        if self.version == version:
            self._to_save.add(role)

    def take(self, version: int, reached: Mapping[str, int]) -> None:
        """Save the last version, due or not. All roles are at `version` and at rest."""
        if self.version is None:
            self._begin(version)
            self._to_save.update(reached)

    def next_part(self, role: str) -> int | None:
        """The version whose part the role must save now, once."""
        if role not in self._to_save:
            return None
        self._to_save.remove(role)
        self._saving.add(role)
        return self.version

    def part_saved(self, role: str, version: int) -> None:
        if role in self._saving and version == self.version:
            self._saving.remove(role)
            self._parts[role] = version

    def next_commit(self, reached: Mapping[str, int], assembled: int) -> int | None:
        """The version whose parts are all written and may become a snapshot now, once."""
        version = self.version
        if version is None or self._committing or any(self._parts.get(role) != version for role in reached):
            return None
        if assembled < self._policy.batches_needed(version):
            return None
        self._committing = True
        self._parts.clear()
        return version

    def committed(self, version: int) -> bool:
        """False: this attempt was given up before, even if the same version is being saved again."""
        if version in self._given_up:
            self._given_up.remove(version)
            return False
        if version != self.version:
            return False
        self._stop()
        self._unseen.add(version)
        return True

    def failed(self, version: int) -> bool:
        """The attempt is void, with every part of it. False: it was given up before."""
        self._given_up.discard(version)
        if version != self.version:
            return False
        self._stop()
        self._parts.clear()
        return True

    def rewind(self, role: str) -> None:
        """The role died and comes back from `saved`. What is being saved is given up; the parts of other roles stay."""
        if self._committing and self.version is not None:
            self._given_up.add(self.version)
        self._stop()
        self._parts.pop(role, None)

    def forget_unseen(self) -> None:
        """Versions that are not visible will be made again."""
        self._unseen.clear()

    def count(self, newest: int) -> range:
        """A snapshot counts once its version is visible: an executor that comes back from it has nothing older left to
        publish. Returns the updates that are newly covered."""
        seen = {version for version in self._unseen if version <= newest}
        self._unseen -= seen
        covered = range(self.saved, max(seen, default=0))
        self.saved = max(self.saved, covered.stop)
        return covered

    def lacks(self, version: int, *, stopping: bool) -> bool:
        """Whether the last version still needs a snapshot. One that was begun is always finished; a job that is stopped
        will be resumed, and needs one."""
        if version in self._unseen or version == self.saved:
            return False
        return stopping or self.settings.at_end != "none" or self.version is not None

    def _is_due(self, version: int) -> bool:
        every = self.settings.every
        return every > 0 and version % every == 0 and version > self.saved

    def _will_be_whole(self, role: str, reached: Mapping[str, int]) -> bool:
        """Every other role has still to make this version, or has written its part of it before this role died."""
        version = reached[role]
        others = (one for one in reached if one != role)
        return all(reached[other] < version or self._parts.get(other) == version for other in others)

    def _begin(self, version: int) -> None:
        self.version = version
        self._parts = {role: made for role, made in self._parts.items() if made == version}

    def _stop(self) -> None:
        self.version, self._committing = None, False
        self._to_save.clear()
        self._saving.clear()
