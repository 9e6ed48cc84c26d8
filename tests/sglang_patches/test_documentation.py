"""docs/server.md against the code: its hooks, options, fields and reasons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from redknot.errors import DocumentReason, RequestReason
from redknot.serving.batch import _ASK_KEYS
from sglang_patches.options import ServerConfig
from sglang_patches.table import as_markdown

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text(encoding="utf-8")


def test_the_table_of_hooks_is_the_one_that_is_applied() -> None:
    found = TEXT.partition("<!-- hooks -->\n")[2].partition("<!-- /hooks -->")[0].strip()
    assert found == as_markdown(), "python -m sglang_patches.table prints the table"


@pytest.mark.parametrize("name", [*ServerConfig.model_fields, *_ASK_KEYS, *RequestReason])
def test_every_field_and_reason_has_a_line(name: str) -> None:
    assert re.search(rf"^\| `{name}` \|", TEXT, re.MULTILINE)


@pytest.mark.parametrize("name", DocumentReason)
def test_every_reason_of_documents_is_named(name: str) -> None:
    assert f"`{name}`" in TEXT
