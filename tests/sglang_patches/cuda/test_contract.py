"""The installed SGLang is what the CUDA adapter was made for, and any difference is named.

Nothing of SGLang is imported: its modules for DeepSeek-V4 need a GPU's libraries, so its source is read instead.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from redknot.errors import ConfigError
from sglang_patches.cuda import contract
from sglang_patches.cuda.contract import CALLS, CONSTANTS, FILES, MEMBERS, TEXTS, differences, index_pages, require
from sglang_patches.cuda.source import Source, package_folder

FOLDER = package_folder("sglang")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="sglang is in an environment of its own")


@pytest.fixture(scope="module")
def source() -> Source:
    return contract.installed()


def test_the_installed_one_is_the_one(source):
    assert list(differences(source)) == []
    require(source)


LAYOUT, FUSED = (file.path for file in FILES[:2])


def files() -> set[str]:
    """What the contract looks at, by path."""
    modules = {item.module for group in (CALLS, MEMBERS, CONSTANTS, TEXTS) for item in group}
    return {f"{module.replace('.', '/')}.py" for module in modules} | {file.path for file in FILES}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert FOLDER is not None
    to = tmp_path_factory.mktemp("sglang")
    for name in files():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(FOLDER / name, to / name)
    return to


@pytest.fixture
def altered(copy: Path) -> Callable[[str, str, str], Source]:
    """A copy of what is looked at, with one piece of text replaced; put back afterwards."""
    kept: dict[Path, str] = {}

    def change(module: str, old: str, new: str) -> Source:
        path = copy / (module if "/" in module else f"{module.replace('.', '/')}.py")
        text = kept.setdefault(path, path.read_text())
        assert old in text, f"the test changes nothing in {path}"
        path.write_text(text.replace(old, new))
        return Source(copy)

    yield change
    for path, text in kept.items():
        path.write_text(text)


def test_a_copy_is_as_good(copy):
    assert list(differences(Source(copy))) == []


CHANGES = {
    "a parameter less": (
        contract.MODEL,
        "embeds: Optional[torch.Tensor] = None,\n        pp_proxy_tensors: Optional[PPProxyTensors] = None,\n"
        "    ) -> torch.Tensor:",
        "embeds: Optional[torch.Tensor] = None,\n    ) -> torch.Tensor:",
        "DeepseekV4ForCausalLM.forward is (self input_ids positions forward_batch input_embeds), not (",
    ),
    "a method under another name": (
        contract.POOL, "def get_swa_raw_buffer", "def get_swa_buffer",
        "get_swa_raw_buffer is not there, not (self layer_id) (pages of window latents)",
    ),
    "an attribute less": (
        contract.ALLOCATOR + "swa", "self.full_attn_allocator = ", "self.whole_allocator = ",
        "SWATokenToKVPoolAllocator has no full_attn_allocator (",
    ),
    "another width": (contract.DEQUANTISED, "DIM_NOPE = 448", "DIM_NOPE = 384", "DIM_NOPE is 384, not 448 (a record)"),
    "another name of the model": (
        contract.MODEL, "EntryClass = [DeepseekV4ForCausalLM]", "EntryClass = [DeepseekV4]", "EntryClass is [Deep",
    ),
    "other rounding": (contract.FP4, "ax > 0.25", "ax >= 0.25", "_fp4_e2m1_code is "),
    "another padding of pages": (
        LAYOUT, "KVLayout.V4: 576,", "KVLayout.V4: 584,", "kv_layout.py is ",
    ),
    "another kernel": (FUSED, "kHadamardScale", "kScale", "fused_norm_rope_v2.cuh is "),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_difference_is_named(change, altered):
    module, old, new, said = CHANGES[change]
    source = altered(module, old, new)
    assert any(said in line for line in differences(source)), list(differences(source))
    with pytest.raises(ConfigError) as caught:
        require(source)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("this SGLang is not what --device cuda was made for: ")
    assert line.endswith("; install sglang==0.5.23 unchanged, or serve with --device cpu")


def test_what_is_not_there_at_all_is_named(tmp_path):
    found = list(differences(Source(tmp_path)))
    count = sum(map(len, (CALLS, MEMBERS, CONSTANTS, TEXTS, FILES)))
    assert len(found) == count
    assert all("not there" in line or "has no " in line for line in found)
    with pytest.raises(ConfigError, match=rf"and {count - 1} more"):
        require(Source(tmp_path))


def test_no_sglang_is_named(monkeypatch):
    monkeypatch.setattr(contract, "package_folder", lambda _: None)
    with pytest.raises(ConfigError, match=r"^sglang is not installed; supported: 0\.5\.23$"):
        contract.installed()


def test_bytes_of_pages_are_those_of_the_issue():
    """256-token pages: 149,760 and 37,440 and 1,728 bytes of records, 8,448 (fp8) and 4,352 (fp4) of indexer keys."""
    assert {what: nbytes for what, _, nbytes, _ in contract.record_pages()} == {
        "window latents": 149_760, "CSA entries": 37_440, "HCA entries": 1_728,
    }  # fmt: skip
    assert index_pages() == {"fp8": 8_448, "fp4": 4_352}


@pytest.mark.parametrize(("what", "rows", "nbytes", "addressing"), list(contract.record_pages()))
def test_sglangs_own_arithmetic_gives_our_pages(what, rows, nbytes, addressing):
    """``kv_layout`` is plain Python and runs by itself, without the package around it."""
    spec = spec_from_file_location("sglang_kv_layout", FOLDER / LAYOUT)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    layout = module.KVLayout.V4
    assert (layout.page_bytes(rows), layout.row_addressing(rows)) == (nbytes, addressing)
    assert layout.bytes_per_token == 584


def test_sglangs_own_arithmetic_gives_the_bytes_of_indexer_keys(source):
    """Its function, run from its text: it imports nothing, its module a GPU's libraries."""
    space: dict[str, Callable[..., int]] = {}
    exec(source.text(contract.POOL, "get_dsv4_indexer_bytes_per_token"), space)
    own = space["get_dsv4_indexer_bytes_per_token"]
    assert {"fp8": 64 * own(128, False), "fp4": 64 * own(128, True)} == index_pages()


def test_the_name_is_what_sglang_goes_by(source):
    """Why our model has the native one's name: pools, pages and backend of V4 hang on it."""
    text = source._read("srt.configs.model_config")
    assert text.count('"DeepseekV4ForCausalLM"') >= 5
    assert '@_register_for("DeepseekV4ForCausalLM")' in source._read("srt.arg_groups.model_overrides.deepseek_v4")
