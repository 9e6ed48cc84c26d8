"""Opening and making a store."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from redknot.artifact.catalogue import Catalogue
from redknot.artifact.files import store_error
from redknot.artifact.schema import CATALOGUE_FILE, OBJECTS_DIR, QUARANTINE_DIR, TEMPORARY_DIR
from redknot.errors import StoreError


def open_catalogue(root: Path, *, create: bool) -> Catalogue:
    """Open a store's catalogue, making the store first if asked; StoreError in one line when it is none."""
    path = root / CATALOGUE_FILE
    try:
        if not create:
            if not root.is_dir():
                raise StoreError(f"there is no artifact store at {root}: build one with `redknot build`")
            if not path.is_file():
                raise StoreError(f"{root} is not an artifact store: it holds no {CATALOGUE_FILE}")
            return Catalogue(path)
        root.mkdir(parents=True, exist_ok=True)
        ours = {OBJECTS_DIR, TEMPORARY_DIR, QUARANTINE_DIR, ".lock"}
        foreign = [name for name in os.listdir(root) if name not in ours and not name.startswith(CATALOGUE_FILE)]
        if path.exists() and not path.is_file():
            raise StoreError(f"{root} is not an artifact store: its {CATALOGUE_FILE} is not a regular file")
        if foreign and not path.exists():
            raise StoreError(f"{root} is not an artifact store and not empty (found {foreign[0]}): choose another path")
        lock = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for name in (OBJECTS_DIR, TEMPORARY_DIR, QUARANTINE_DIR):
                (root / name).mkdir(exist_ok=True)
            return Catalogue.create(path)
        finally:
            os.close(lock)
    except OSError as error:
        raise store_error("create" if create else "open", root, error) from error
