"""A store that cannot be written can be read, and whatever would change it ends in one clear line."""

import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from redknot.artifact import connection
from redknot.artifact.store import ArtifactStore
from redknot.errors import CorruptSectionError, StoreError
from tests.artifact.kit import NAMESPACE, TOKENS, directory_of, draft, flip, model, publish, read_all, sections

MOUNT = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'


@pytest.fixture
def refuse_writing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a read-only mount answers; what is written all the same would be seen."""
    native = os.access
    monkeypatch.setattr(
        connection.os, "access", lambda path, mode: not (mode & os.W_OK and path == root) and native(path, mode)
    )


def built(root: Path) -> str:
    with ArtifactStore(root, create=True) as store:
        return publish(store, draft(), sections(1.0), TOKENS, ["a.txt"]).artifact_id


def content(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def artifact_id(root: Path, request: pytest.FixtureRequest) -> str:
    made = built(root)
    request.getfixturevalue("refuse_writing")
    return made


def test_reading(root: Path, artifact_id: str) -> None:
    before = content(root)
    with ArtifactStore(root) as store:
        [row] = store.tokens(NAMESPACE, model())
        assert row.token_ids.tolist() == TOKENS
        assert store.names(artifact_id, NAMESPACE) == ("a.txt",)
        assert read_all(store, store.load(artifact_id, NAMESPACE).certificate)["boundary.streams"].unique() == 1.0
        assert store.verify()[0].problems == ()
        assert [finding.code for finding in store.doctor()] == ["read_only"]
    assert content(root) == before


def test_changes_are_refused(root: Path, artifact_id: str) -> None:
    before = content(root)
    with ArtifactStore(root) as store:
        for change in (
            lambda: store.remove(artifact_id, NAMESPACE),
            store.gc,
            lambda: store.add_names(artifact_id, NAMESPACE, ["b"]),
            lambda: publish(store, draft(), sections(), [1]),
        ):
            with pytest.raises(StoreError, match=f"^the store {root} can only be read: ") as refused:
                change()
            assert "\n" not in str(refused.value)
    assert content(root) == before


def test_damage_is_noticed_though_not_recorded(root: Path, artifact_id: str, caplog: pytest.LogCaptureFixture) -> None:
    with ArtifactStore(root) as store:
        certificate = store.load(artifact_id, NAMESPACE).certificate
        path = directory_of(store, certificate) / "boundary.safetensors"
        flip(path, path.stat().st_size - 1)
        for _ in range(2):
            with pytest.raises(CorruptSectionError, match=r"not quarantined: the store .* can only be read"):
                read_all(store, certificate)
        assert path.exists()
    assert "last-used times of 1 artifacts were not recorded" in caplog.messages[-1]


def test_what_others_write_meanwhile_is_seen(root: Path, artifact_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of another user, or one mounted read-only here and not there."""
    with ArtifactStore(root) as store:
        seen = [store.revision]
        with monkeypatch.context() as other:
            other.setattr(connection.os, "access", lambda *_: True)
            with ArtifactStore(root) as writer:
                publish(writer, draft(), sections(), [1])
        assert not Path(f"{store.catalogue.path}-wal").exists()
        assert len(store.list()) == 2
        seen.append(store.revision)
        with monkeypatch.context() as other:
            other.setattr(connection.os, "access", lambda *_: True)
            writer = ArtifactStore(root)
            publish(writer, draft(), sections(), [2])
        assert Path(f"{store.catalogue.path}-wal").stat().st_size
        assert len(store.list()) == 3
        seen.append(store.revision)
        assert len(set(seen)) == 3
        writer.close()


def test_a_copy_with_changes_beside_the_catalogue(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading past them would show an older store."""
    built(root)
    copy = tmp_path / "copy"
    with ArtifactStore(root) as store:
        publish(store, draft(), sections(), [1])
        shutil.copytree(root, copy)
    (copy / "catalogue.sqlite-shm").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(connection.os, "access", lambda *_: False)
        with pytest.raises(StoreError, match=r"catalogue\.sqlite-wal holds changes .* open the store once where"):
            ArtifactStore(copy)
    with ArtifactStore(copy) as store:
        assert len(store.list()) == 2


def test_a_read_only_mount(root: Path) -> None:
    """The real thing, where this user may mount."""
    built(root)
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    mounted = ["unshare", "--map-root-user", "--mount", "sh", "-c", MOUNT, "sh", str(root)]
    if subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount")

    def redknot(*arguments: str) -> subprocess.CompletedProcess[str]:
        run = "import sys; from redknot.cli.main import main; sys.exit(main())"
        command = [*mounted, sys.executable, "-c", run, *arguments, "--store", str(root)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert "a.txt" in redknot("ls").stdout
    assert redknot("verify").stdout.endswith("1 artifact read, 0 damaged\n")
    for verb in (["rm", "a.txt"], ["gc"]):
        ran = redknot(*verb)
        assert (ran.returncode, ran.stdout, len(ran.stderr.splitlines())) == (2, "", 1)
        assert "can only be read" in ran.stderr
    create = f"from redknot.artifact.store import ArtifactStore; ArtifactStore({str(root)!r}, create=True)"
    ran = subprocess.run([*mounted, sys.executable, "-c", create], capture_output=True, text=True, check=False)
    assert "EROFS" in ran.stderr.splitlines()[-1]
    assert sqlite3.connect(root / "catalogue.sqlite").execute("SELECT count(*) FROM artifacts").fetchone() == (1,)
