"""`redknot store-check`: read the disk tier of latents completely and add up its books."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from redknot.cli.common import human_bytes, plural, print_json, settings, table
from redknot.config import LATENT_FOLDER
from redknot.errors import ConfigError
from redknot.latents.diskcheck import LayoutCheck, check_folder

EXIT_DIFFERS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    text = "folder of the disk tier (default: latents/ in the cache folder, see REDKNOT_CACHE_DIR)"
    parser.add_argument("--cache", type=Path, metavar="DIR", help=text)
    text = "bytes that it may take (default: REDKNOT_LATENT_DISK_BYTES; 0 for any number)"
    parser.add_argument("--budget", type=int, metavar="BYTES", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Check and print; 1 when a file is damaged or the budget is overrun."""
    configured = settings()
    folder: Path = args.cache or configured.cache_dir / LATENT_FOLDER
    budget: int = configured.latents.disk_bytes if args.budget is None else args.budget
    if budget < 0:
        raise ConfigError(f"--budget {budget}: bytes cannot be negative")
    if args.cache is None and not folder.is_dir():
        found: list[LayoutCheck] = []  # nothing was ever kept there
    else:
        with tqdm(unit=" blocks", disable=not sys.stderr.isatty()) as progress:
            found = check_folder(folder, progress.update)
    live, quarantined = (sum(getattr(check, name) for check in found) for name in ("live", "quarantined"))
    overrun = max(live + quarantined - budget, 0) if budget else 0
    damaged = [problem for check in found for problem in check.damaged]
    if args.json:
        books = {"total": budget, "live": live, "quarantined": quarantined, "free": budget - live - quarantined}
        print_json({"folder": str(folder), "layouts": [asdict(check) for check in found], "books": books})
    else:
        _print(found, damaged, live, quarantined, budget)
    return EXIT_DIFFERS if damaged or overrun else 0


def _print(found: list[LayoutCheck], damaged: list[str], live: int, quarantined: int, budget: int) -> None:
    rows = [
        (check.layout[:12], check.blocks, human_bytes(check.live), human_bytes(check.quarantined), check.unfinished)
        for check in found
    ]
    if rows:
        print(table(("LAYOUT", "BLOCKS", "LIVE", "QUARANTINED", "UNFINISHED"), rows, right=(1, 2, 3, 4)))
    for problem in damaged:
        print(problem)
    free = f", free {human_bytes(budget - live - quarantined)} of {human_bytes(budget)}" if budget else ""
    if budget and live + quarantined > budget:
        free = f", {human_bytes(live + quarantined - budget)} more than the {human_bytes(budget)} it may take"
    blocks = sum(check.blocks for check in found)
    print(f"{plural(blocks, 'block')} read, {len(damaged)} damaged; {human_bytes(live + quarantined)} in use{free}")
