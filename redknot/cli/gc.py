"""`redknot gc`: remove what no reader can find any more."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from redknot.artifact.store import GRACE_S, ArtifactStore
from redknot.cli.common import add_store, human_bytes, plural, print_json, settings
from redknot.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_store(parser)
    text = "seconds that replaced generations and quarantined files stay (default: %(default).0f)"
    parser.add_argument("--grace", type=float, default=GRACE_S, metavar="SECONDS", help=text)


def run(args: argparse.Namespace) -> int:
    """Collect and say what went."""
    settings()
    if not args.grace >= 0:
        raise ConfigError(f"--grace {args.grace:g}: seconds cannot be negative")
    with ArtifactStore(args.store) as store:
        report = store.gc(grace_s=args.grace)
        left = store.bytes_on_disk()
    if args.json:
        removed = asdict(report)
        removed["bytes"] = removed.pop("nbytes")
        print_json({"removed": removed, "left": asdict(left) | {"total": left.total}})
        return 0
    print(
        f"removed {report.temporary} unfinished, {report.superseded} superseded and {report.orphaned} unlisted "
        f"directories and {plural(report.quarantined, 'quarantined file')}, {human_bytes(report.nbytes)}"
    )
    parts = f"artifacts {human_bytes(left.objects)}, quarantine {human_bytes(left.quarantine)}"
    print(f"left {human_bytes(left.total)}: {parts}")
    return 0
