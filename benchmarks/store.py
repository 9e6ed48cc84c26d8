"""The latent store against what it must keep up with: block managers, a memory copy, plain files.

    OMP_NUM_THREADS=1 python -m benchmarks.store [policy|payload|disk ...] [--repeat 9] [--json]

Policy: one trace of requests (`_trace.py`), replayed on fresh instances in turns, no payload moved, on a pool that
live requests nearly fill. A prompt costs the store three calls: `match` (a run of what is there), `open` (blocks for
what is not, and one behind), `commit` (names for all); a full block of an answer two (`commit`, `open`), a fork two,
an end one. Each takes the lock and looks whether the run is alive once; blocks that others hold, pins, leases, host
places and names that are taken are looked at for every block, and counters are kept. The store matches any block that
is there, the baseline (`_nano_vllm.py`) up to the first that is not. It does a prompt in one call, without locks,
checks, tiers and counters. A deque, as in the published design, is searched for a free block that is found again; a
linked queue, which the published design does not have, is not. `keys` are given to both sides, ready made; `hashing`
brings tokens to the baseline, which hashes and compares them, and keys to the store. The target is the published
design, the deque. SGLang's trees (`_radix.py`) stand beside where it is installed (`pip install '.[sglang]'`, no GPU
needed): they are brought tokens, compare them, and keep a slot for each. Policy and payload are in seconds of the
thread's processor, disk is in seconds of the clock.

Payload: `seal` by content against a copy of the same bytes (one thread, working set beyond the last cache): of fresh
contents (hash, look up, install), and of contents that are there (hash, look up, compare, share).

Disk: blocks written one by one (aside, checksum, fsync, rename, fsync of the folder) and read (checksum), against plain
files (fsync; read). Cold reads follow posix_fadvise, and how much of the files it left in the page cache is measured;
the cache of a virtual machine's host stays as it is.

All ratios are medians of paired rounds with 95 % bootstrap intervals; above 1 the store is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import _bytes, _policy
from eval.statistics import Interval

# Flash: a block of 128 tokens without and with all window rows (`redknot layout --model flash`), and one entry page.
BLOCK_BYTES = [65_536, 449_984, 3_664_320]
TARGETS = {"policy": 1.0, "payload": 0.5}


def _mark(ratio: dict[str, Any], section: str) -> str:
    return f"  {'reached' if ratio['value'] >= TARGETS[section] else 'MISSED'}"


def print_policy(found: list[dict[str, Any]]) -> None:
    print(f"POLICY  target {TARGETS['policy']} of the published design")
    for row in found:
        print(
            f"{row['requests']} requests, {row['operations']} operations on {row['blocks']} blocks; "
            f"prompts of {row['prompt_blocks']:.0f} blocks, {row['seated']} in all"
        )
        print(f"  {'side':<29}{'ops/s':>12}{'hits':>8}  store's ops/s over it")
        for side in row["sides"]:
            line = f"  {side['name']:<29}{side['operations_per_s']:>12,.0f}{side['hits']:>8}"
            if "ratio" in side:
                line += f"  {Interval(**side['ratio']):.2f}{_mark(side['ratio'], 'policy') if side['target'] else ''}"
            print(line)
    if found[0]["radix_missing"]:
        print(f"SGLang's trees: not measured, because they cannot be imported ({found[0]['radix_missing']})")
    else:
        print(f"SGLang {found[0]['sglang']}: its servers build the unified tree; neither tree is a target")


def print_payload(rows: list[dict[str, Any]]) -> None:
    print(f"\nPAYLOAD  GB/s, one thread; target {TARGETS['payload']} of a copy")
    print(f"{'block bytes':>11} {'blocks':>6} {'what':<22}{'GB/s':>7}  of the copy's rate")
    for row in rows:
        for name, rate in row["gb_per_s"].items():
            ratio = row["ratios"].get(name)
            text = "" if ratio is None else f"  {Interval(**ratio):.2f}"
            text += _mark(ratio, "payload") if ratio and name.startswith("seal") else ""
            print(f"{row['block_bytes']:>11,} {row['blocks']:>6} {name:<22}{rate:>7.2f}{text}")


def print_disk(rows: list[dict[str, Any]]) -> None:
    print("\nDISK  GB/s")
    print(f"{'block bytes':>11} {'blocks':>6} {'what':<12}{'store':>7}{'plain file':>12}  store's rate over it")
    for row in rows:
        for name, rates in row["gb_per_s"].items():
            print(
                f"{row['block_bytes']:>11,} {row['blocks']:>6} {name:<12}{rates['store']:>7.2f}{rates['plain']:>12.2f}"
                f"  {Interval(**row['ratios'][name]):.2f}"
            )
        print(f"{'':>18} {row['resident_after_drop']:.0%} of the files were still in the page cache when read cold")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help="policy, payload, disk; default: all")
    parser.add_argument("--repeat", type=int, default=9, help="rounds of every comparison")
    parser.add_argument("--seed", type=int, default=0, help="of the trace")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=[2048, 4096, 8192], help="capacities in the policy comparison"
    )
    parser.add_argument("--block-bytes", type=int, nargs="+", default=BLOCK_BYTES)
    parser.add_argument("--payload-mib", type=int, default=64, help="bytes a round of the payload comparison")
    parser.add_argument("--disk-mib", type=int, default=12, help="bytes a round of the disk comparison")
    parser.add_argument("--folder", type=Path, help="where the disk comparison writes; default: the temporary folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sections = options.sections or ["policy", "payload", "disk"]
    if unknown := set(sections) - {"policy", "payload", "disk"}:
        parser.error(f"unknown section: {', '.join(sorted(unknown))}; there are policy, payload and disk")
    if options.repeat < 3:
        parser.error(f"--repeat {options.repeat}: an interval needs at least 3 rounds")
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    found: dict[str, Any] = {"repeat": options.repeat, "cores": os.cpu_count(), "load_before": load}
    if "policy" in sections:
        found["policy"] = [
            _policy.measure(blocks, options.requests, options.seed, options.repeat) for blocks in options.blocks
        ]
    if "payload" in sections:
        found["payload"] = [
            _bytes.measure_payload(nbytes, options.payload_mib << 20, options.repeat) for nbytes in options.block_bytes
        ]
    if "disk" in sections:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found["disk"] = [
                _bytes.measure_disk(Path(folder), nbytes, options.disk_mib << 20, options.repeat)
                for nbytes in options.block_bytes
            ]
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['cores']} cores, load {load:.1f} when it began, {options.repeat} rounds")
    for section, show in (("policy", print_policy), ("payload", print_payload), ("disk", print_disk)):
        if section in found:
            show(found[section])


if __name__ == "__main__":
    main()
