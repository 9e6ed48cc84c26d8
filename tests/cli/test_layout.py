"""`redknot layout`: the table, the JSON document, and what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from redknot.model.published import published_config


def test_flash_is_the_default(redknot):
    ran = redknot("layout")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == redknot("layout", "--model", "flash", "--format", "fp8", "--tokens", 32768).out
    lines = ran.out.splitlines()
    assert lines[0] == "flash: 43 layers (2 SLIDING, 21 CSA, 20 HCA), window 128"
    assert lines[1].startswith("format fp8, blocks of 128 tokens, pages of 256;")
    cells = [line.split() for line in lines]
    assert "SLIDING 2 - - - - -".split() in cells
    assert "CSA 21 4 160 163 20,864 37,440 entries + 4,352 index".split() in cells
    assert "HCA 20 128 4.5 4.625 592 1,728 entries".split() in cells
    assert "window 43 1 576 584 74,752 149,760 window".split() in cells
    assert "CSA index_keys 32 64 18,688 2,048 128 fp4_e2m1 key".split() in cells
    assert "entries, values 3,450 3,532,800 113,049,600".split() in cells
    assert "all window rows, values 24,768 25,362,432 811,597,824".split() in cells
    behind = "state behind 32,768 tokens: window 3,214,336 (3.21 MB), compressor tail 860,160 (860 kB)"
    assert behind in lines


def test_pro(redknot):
    out = redknot("layout", "--model", "pro", "--format", "fp8-index8").out
    assert "pro: 61 layers (30 CSA, 31 HCA), window 128" in out
    assert "37,440 entries + 8,448 index" in out


def test_plain_formats_have_no_pages(redknot):
    lines = redknot("layout", "--model", "nano", "--format", "fp32").out.splitlines()
    assert lines[0] == "nano: 12 layers (2 SLIDING, 5 CSA, 5 HCA), window 32"
    assert "pages" not in lines[1]
    cells = [line.split() for line in lines]
    assert "CSA 5 4 160 160 5,120 -".split() in cells
    assert "window 12 1 512 512 16,384 -".split() in cells


def test_json(redknot):
    found = redknot("layout", "--json", "--tokens", 1001).json
    assert (found["model"], found["format"], found["layers"], found["block_tokens"]) == ("flash", "fp8", 43, 128)
    assert found["per_token"] == {
        "entries": {"values": 3450, "stored": 3515.5},
        "all_windows": {"values": 24768, "stored": 25112},
    }
    assert found["block"] == {"values": 441600, "stored": 449984}
    assert len(found["layer_offsets"]) == 43
    kinds = {kind["kind"]: kind for kind in found["kinds"]}
    hca = kinds["heavily_compressed_attention"]
    assert hca["entries"]["per_token"] == {"values": 4.5, "stored": 4.625}
    assert [region["name"] for region in hca["entries"]["regions"]] == ["latents", "scales"]
    assert hca["entries"]["regions"][0] == {
        "name": "latents",
        "row": "448 fp8_e4m3 content, 64 bf16 rope",
        "rows": 1,
        "row_bytes": 576,
        "offset": 0,
        "length": 576,
    }
    csa = kinds["compressed_sparse_attention"]
    assert {store: page["bytes"] for store, page in csa["pages"].items()} == {
        "window": 149760,
        "entries": 37440,
        "index": 4352,
    }
    assert kinds["sliding_attention"]["entries"]["regions"] == []
    document = found["document"]
    assert document["tokens"] == 1001
    assert document["entries"] == {"values": 21 * 251 * 640 + 20 * 8 * 576, "stored": 8 * 449984}
    assert document["tail"]["stored"] == 21 * 5 * 10240 + 20 * 105 * 4096
    assert found["request"]["tail"]["stored"] == 12206080
    assert found["checkpoint"]["tail"]["stored"] == 860160


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_checkpoint(redknot, checkpoint, kind):
    path = checkpoint if kind == "folder" else checkpoint / "config.json"
    found = redknot("layout", "--model", path, "--json", "--format", "bf16").json
    assert (found["model"], found["layers"], found["window"]) == (str(path), 4, 32)
    assert found["per_token"]["entries"] == {"values": 168, "stored": 168}  # 2 CSA layers of 80, an HCA layer of 8


def test_a_configuration_is_enough(redknot, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published_config("pro")))
    for path in (tmp_path, "config.json"):
        assert redknot("layout", "--model", path, "--json").json["layers"] == 61


def test_a_name_goes_before_a_folder(redknot, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "flash")
    assert redknot("layout", "--json").json["layers"] == 43
    assert redknot("layout", "--model", "./flash", "--json").json["layers"] == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "flahs"], "--model flahs: no such model or path; give flash, pro, nano, or a checkpoint folder"),
        (["--model", "."], "no config.json; give the folder of a DeepSeek-V4 checkpoint"),
        (["--tokens", "0"], "--tokens is 0; a document has at least one"),
        (["--tokens", "-5"], "--tokens is -5"),
        (["--page-tokens", "192"], "a page of 192 tokens would split a block of 128"),
        (["--page-tokens", "0"], "a page of 0 tokens"),
        (["--format", "fp32", "--page-tokens", "256"], "--page-tokens is for formats that SGLang's kernels read"),
    ],
)
def test_refusals_are_one_line(redknot, arguments, words):
    ran = redknot("layout", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("redknot layout: error: ")
    assert words in ran.err
    assert ran.err.count("\n") == 1


def test_other_models_are_refused_by_name(redknot, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published_config("flash") | {"model_type": "deepseek_v3"}))
    ran = redknot("layout", "--model", tmp_path)
    assert ran.code == 2
    assert "'deepseek_v3' is not supported" in ran.err


@pytest.mark.parametrize("wrong", [["--format", "int8"], ["--tokens", "many"], ["extra"]])
def test_usage_errors(redknot, wrong):
    with pytest.raises(SystemExit) as exit_:
        redknot("layout", *wrong)
    assert exit_.value.code == 2


def test_python_m_redknot_layout():
    command = [sys.executable, "-m", "redknot", "layout", "--model", "pro", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["per_token"]["entries"]["values"] == 4939.5
