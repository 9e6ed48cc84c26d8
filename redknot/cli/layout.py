"""`redknot layout`: what the latents of a model weigh, by layer kind, region, block, page and document."""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path
from typing import Any

from redknot.cli.common import human_bytes, plural, print_json, table
from redknot.cli.printable import printable
from redknot.errors import ConfigError
from redknot.latents.formats import PRECISIONS
from redknot.latents.layout import SGLANG_PAGE_TOKENS, Block, LayerLayout, ModelLayout, Size, State, model_layout
from redknot.model.geometry import Geometry, LayerKind, geometry_from_config, load_geometry
from redknot.model.published import PUBLISHED, published_config

DEFAULT_TOKENS = 32768
_THOUSAND = 1024  # "1K" of a sequence
_NAMES = (*PUBLISHED, "nano")

Pages = dict[LayerKind, dict[str, Block]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    text = f"{', '.join(_NAMES)}, or the path of a checkpoint folder or its config.json (default: %(default)s)"
    parser.add_argument("--model", default="flash", metavar="NAME|PATH", help=text)
    parser.add_argument("--format", choices=PRECISIONS, default="fp8", help="precision (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=DEFAULT_TOKENS, help="document length (default: %(default)s)")
    text = f"tokens in a page of SGLang, for the formats that its kernels read (default: {SGLANG_PAGE_TOKENS})"
    parser.add_argument("--page-tokens", type=int, help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the layout; nothing but the configuration of the model is read."""
    if args.tokens < 1:
        raise ConfigError(f"--tokens is {args.tokens}; a document has at least one")
    layout = model_layout(_geometry(args.model), PRECISIONS[args.format])
    pages = _pages(layout, args.page_tokens)
    if args.json:
        print_json({"model": args.model, **_json(layout, pages, args.tokens)})
    else:
        _print(args.model, layout, pages, args.tokens)
    return 0


def _geometry(model: str) -> Geometry:
    """The geometry of a named model, or of a checkpoint; a name goes before a folder that is called the same."""
    if model in PUBLISHED:
        return geometry_from_config(published_config(model))
    if model == "nano":
        from redknot.nano.parameters import GEOMETRY

        return GEOMETRY
    path = Path(model)
    if not path.exists():
        raise ConfigError(f"--model {model}: no such model or path; give {', '.join(_NAMES)}, or a checkpoint folder")
    return load_geometry(path.parent if path.name == "config.json" else path)


def _pages(layout: ModelLayout, page_tokens: int | None) -> Pages:
    if layout.precision.paged:
        return layout.pages(SGLANG_PAGE_TOKENS if page_tokens is None else page_tokens)
    if page_tokens is not None:
        raise ConfigError(f"--page-tokens is for formats that SGLang's kernels read; {layout.precision.name} is none")
    return {}


def _json(layout: ModelLayout, pages: Pages, tokens: int) -> dict[str, Any]:
    return {
        "format": layout.precision.name,
        "alignment": layout.precision.alignment,
        "layers": layout.geometry.num_layers,
        "window": layout.geometry.window,
        "block_tokens": layout.block_tokens,
        "block": _size_json(layout.block),
        "layer_offsets": list(layout.offsets),
        "kinds": [_kind_json(layout, kind, pages) for kind in layout.kinds],
        "per_token": {
            "entries": _size_json(layout.entries_per_token),
            "all_windows": _size_json(layout.window_per_token),
        },
        "document": {
            "tokens": tokens,
            "entries": _size_json(layout.entries(tokens)),
            "all_windows": _size_json(layout.window_per_token * tokens),
            **_state_json(layout.state(tokens)),
        },
        "request": _state_json(layout.arena),
        "checkpoint": _state_json(layout.checkpoint),
    }


def _kind_json(layout: ModelLayout, kind: LayerLayout, pages: Pages) -> dict[str, Any]:
    return {
        "kind": str(kind.kind),
        "layers": layout.geometry.kinds.count(kind.kind),
        "ratio": kind.ratio,
        "entries": _block_json(kind.entries),
        "window": _block_json(kind.window),
        "tail": _block_json(kind.tail),
        "pages": {store: _block_json(page) for store, page in pages.get(kind.kind, {}).items()},
    }


def _block_json(block: Block) -> dict[str, Any]:
    return {
        "tokens": block.tokens,
        "bytes": block.nbytes,
        "per_token": _size_json(block.per_token),
        "regions": [
            {
                "name": str(region.name),
                "row": str(region.row),
                "rows": region.rows,
                "row_bytes": region.row.nbytes,
                "offset": region.offset,
                "length": region.length,
            }
            for region in block.regions
        ],
    }


def _size_json(size: Size) -> dict[str, int | float]:
    return {"values": _number(size.values), "stored": _number(size.stored)}


def _state_json(state: State) -> dict[str, Any]:
    return {"window": _size_json(state.window), "tail": _size_json(state.tail)}


def _number(count: Fraction) -> int | float:
    """A whole number where it is one; the exact fraction is a block's bytes over its tokens."""
    return count.numerator if count.denominator == 1 else float(count)


def _text(count: Fraction) -> str:
    return f"{count.numerator:,}" if count.denominator == 1 else f"{float(count):,.4f}".rstrip("0")


def _print(name: str, layout: ModelLayout, pages: Pages, tokens: int) -> None:
    geometry = layout.geometry
    counts = ", ".join(f"{geometry.kinds.count(kind.kind)} {kind.kind.name}" for kind in layout.kinds)
    print(f"{printable(name)}: {plural(geometry.num_layers, 'layer')} ({counts}), window {geometry.window}")
    paging = {page.tokens for stores in pages.values() for page in stores.values()}
    of_pages = "".join(f", pages of {page_tokens}" for page_tokens in paging)
    print(f"format {layout.precision.name}, blocks of {layout.block_tokens} tokens{of_pages}; sizes are bytes, of the")
    print(f"values alone, and stored: with scales, padding and alignment to {layout.precision.alignment}")
    print()
    print(_kinds_table(layout, pages))
    print()
    print(_regions_table(layout))
    print()
    print(_totals_table(layout, tokens))
    print()
    for line in _state_lines(layout, tokens):
        print(line)


def _kinds_table(layout: ModelLayout, pages: Pages) -> str:
    """What a layer of each kind keeps of a token; the window's rows are the same in all of them."""
    rows = []
    for kind in layout.kinds:
        stores = {store: page for store, page in pages.get(kind.kind, {}).items() if store != "window"}
        rows.append(_kind_row(kind.kind.name, layout.geometry.kinds.count(kind.kind), kind.entries, stores))
    first = layout.kinds[0]
    stores = {store: page for store, page in pages.get(first.kind, {}).items() if store == "window"}
    rows.append(_kind_row("window", layout.geometry.num_layers, first.window, stores))
    header = ("PER LAYER", "LAYERS", "TOKENS/ROW", "VALUES/TOKEN", "STORED/TOKEN", "BLOCK", "PAGE")
    return table(header, rows, right=(1, 2, 3, 4, 5))


def _kind_row(name: str, layers: int, block: Block, pages: dict[str, Block]) -> list[object]:
    if not block.regions:
        return [name, layers, *"-----"]
    found = " + ".join(f"{page.nbytes:,} {store}" for store, page in pages.items())
    per_token = block.per_token
    values, stored = _text(per_token.values), _text(per_token.stored)
    return [name, layers, block.ratio, values, stored, f"{block.nbytes:,}", found or "-"]


def _regions_table(layout: ModelLayout) -> str:
    blocks = [(kind.kind.name, kind.entries) for kind in layout.kinds] + [("window", layout.kinds[0].window)]
    rows = [
        (name, region.name, region.rows, region.row.nbytes, f"{region.offset:,}", f"{region.length:,}", region.row)
        for name, block in blocks
        for region in block.regions
    ]
    return table(("BLOCK", "REGION", "ROWS", "BYTES/ROW", "OFFSET", "LENGTH", "ROW"), rows, right=(2, 3, 4, 5))


def _totals_table(layout: ModelLayout, tokens: int) -> str:
    entries, window = layout.entries_per_token, layout.window_per_token
    rows = [
        ("entries, values", entries.values, layout.entries(tokens).values),
        ("entries, stored", entries.stored, layout.entries(tokens).stored),
        ("all window rows, values", window.values, window.values * tokens),
        ("all window rows, stored", window.stored, window.stored * tokens),
    ]
    lines = [(name, _text(one), _text(one * _THOUSAND), _text(document)) for name, one, document in rows]
    header = ("ALL LAYERS", "PER TOKEN", f"{_THOUSAND:,} TOKENS", f"DOCUMENT OF {tokens:,}")
    return table(header, lines, right=(1, 2, 3))


def _state_lines(layout: ModelLayout, tokens: int) -> list[str]:
    """Window and tail, each where it is kept; the last window of a document goes with its end."""
    places = {
        f"state behind {tokens:,} tokens": layout.state(tokens),
        "state at a checkpoint": layout.checkpoint,
        "room in a request": layout.arena,
    }
    return [
        f"{name}: window {_exact(state.window.stored)}, compressor tail {_exact(state.tail.stored)}"
        for name, state in places.items()
    ]


def _exact(count: Fraction) -> str:
    return f"{_text(count)} ({human_bytes(int(count))})"
