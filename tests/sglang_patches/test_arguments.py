"""What a command line says before SGLang parses it is what SGLang's own parser says later."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_patches.arguments import Wish, read_wish


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", Wish()),
        ("--model-path nano", Wish()),
        ("--enable-redknot", Wish(enabled=True)),
        ("--enable-redknot --device cpu", Wish(enabled=True, device="cpu")),
        ("--device=cpu", Wish(device="cpu")),
        ("--device cuda --device cpu", Wish(device="cpu")),
        ("--device", Wish()),
        ("--device=", Wish(device="")),
        ("--devices cpu", Wish()),
        ("--tp-size 4", Wish(tp_size=4)),
        ("--tp-size=4", Wish(tp_size=4)),
        ("--tp 2", Wish(tp_size=2)),
        ("--tensor-parallel-size 8", Wish(tp_size=8)),
        ("--tp-size 2 --tp 4", Wish(tp_size=4)),
        ("--tp-size many", Wish()),
        ("--tp-size ٣", Wish()),
        ("--tp-size 0", Wish()),
        ("--tp-size -2", Wish()),
        ("-h", Wish(help=True)),
        ("--enable-redknot --help", Wish(enabled=True, help=True)),
        ("--enable-redknot=true", Wish()),
    ],
)
def test_forms_of_the_command_line(words, wanted):
    assert read_wish(words.split()) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("enable-redknot: true\ndevice: cpu\ntp-size: 2\n", Wish(True, "cpu", 2)),
        ("enable-redknot: false\ndevice: cpu\n", Wish(False, "cpu")),
        ("tp: 4", Wish(tp_size=4)),
        ("tensor-parallel-size: 4\ntp-size: 2\n", Wish(tp_size=2)),
        # SGLang makes --enable_redknot of it, which its parser does not know
        ("enable_redknot: true\n", Wish()),
        ("enable-redknot: 'true'", Wish(enabled=True)),
        ("", Wish()),
        ("[1, 2]", Wish()),
        ("nothing", Wish()),
        ("a: [", Wish()),
        ("when: 2024-13-45", Wish()),
        ("1: 2\nnull: 3\ndevice: cpu", Wish(device="cpu")),
    ],
)
def test_forms_of_a_file(text, wanted, tmp_path):
    path = tmp_path / "server.yaml"
    path.write_text(text)
    assert read_wish(["--config", str(path)]) == wanted
    # SGLang reads a file that is named in a word of its own only
    assert read_wish([f"--config={path}"]) == Wish()


def test_the_command_line_wins(tmp_path):
    path = tmp_path / "server.yaml"
    path.write_text("device: cuda\ntp-size: 8")
    for words in (["--device", "cpu", "--tp", "2", "--config", str(path)], ["--config", str(path), "--device=cpu"]):
        assert read_wish(words).device == "cpu"
    assert read_wish(["--tp", "2", "--config", str(path)]).tp_size == 2


def test_files_that_cannot_be_read_are_left_to_sglang(tmp_path):
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00enable-redknot: true")
    for path in (tmp_path, tmp_path / "missing.yaml", binary):
        assert read_wish(["--config", str(path), "--device", "cpu"]) == Wish(device="cpu")
    assert read_wish(["--config"]) == Wish()


def test_sglang_has_these_options_and_no_other_spelling(installed):
    spellings = {
        name: {option for option, dest in installed.options.items() if dest == name}
        for name in ("tp_size", "device", "config")
    }
    assert spellings == {
        "tp_size": {"--tensor-parallel-size", "--tp-size"},
        "device": {"--device"},
        "config": {"--config"},
    }
    assert [option for option in installed.options if option.startswith("--tp")] == [
        "--tp-size"
    ]  # so --tp is short for it


def merger() -> Any:
    """SGLang's reader of configuration files, without SGLang."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0]) / "srt" / "utils" / "server_args_config_parser.py"
    spec = importlib.util.spec_from_file_location("config_parser", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ConfigArgumentMerger


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(exit_on_error=False)
    found.add_argument("--enable-redknot", action="store_true")
    found.add_argument("--device")
    found.add_argument("--tp-size", "--tensor-parallel-size", "--tp", type=int, default=1)
    found.add_argument("--model-path")
    found.add_argument("--config")
    return found


DEVICES = st.sampled_from(["cpu", "cuda", "xpu"])
SIZES = st.sampled_from(["1", "2", "8"])
OPTION = st.one_of(
    st.just(["--enable-redknot"]),
    st.builds(lambda value, joined: [f"--device={value}"] if joined else ["--device", value], DEVICES, st.booleans()),
    st.builds(
        lambda name, value, joined: [f"{name}={value}"] if joined else [name, value],
        st.sampled_from(["--tp-size", "--tensor-parallel-size", "--tp"]),
        SIZES,
        st.booleans(),
    ),
    st.just(["--model-path", "nano"]),
)


@given(
    options=st.lists(OPTION, max_size=6),
    at=st.integers(0, 6),
    file=st.none()
    | st.fixed_dictionaries(
        {},
        optional={
            "enable-redknot": st.booleans(),
            "device": DEVICES,
            "tp": SIZES.map(int),
            "tp-size": SIZES.map(int),
            "model-path": st.just("nano"),
        },
    ),
)
def test_it_agrees_with_sglang(options, at, file, tmp_path_factory):
    words = [list(option) for option in options]
    if file is not None:
        path = tmp_path_factory.getbasetemp() / "drawn.yaml"
        path.write_text("".join(f"{key}: {str(value).lower()}\n" for key, value in file.items()))
        words.insert(at, ["--config", str(path)])
    argv = [word for option in words for word in option]
    found = read_wish(argv)
    known = parser()
    merged = merger()(known).merge_config_with_args(argv) if file is not None else argv
    wanted = known.parse_args(merged)
    assert (found.enabled, found.device, found.tp_size) == (wanted.enable_redknot, wanted.device, wanted.tp_size)
