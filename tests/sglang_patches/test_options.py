"""Options are checked before anything is loaded; each refusal is one line that names the option."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redknot.errors import ConfigError, RedKnotError, StoreError
from sglang_patches import environment, launch
from sglang_patches.options import (
    _DTYPES,
    _ONE,
    _REFUSED,
    ARCHITECTURE,
    Options,
    ServerConfig,
    add_arguments,
    defaults,
    model_path,
    one_line,
    read_config,
    refuse_device,
    refuse_unsupported,
)
from tests.kit.child import NANO, ROOT

MOST = 65536  # positions of nano


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    from redknot.artifact.store import ArtifactStore

    path = tmp_path_factory.mktemp("options") / "store"
    with ArtifactStore(path, create=True):
        return Options.read(str(NANO), str(path), "rowsparse", None)


def arguments(**changes: object) -> Namespace:
    return Namespace(device="cpu", **changes)


def refusal(call, *words: object) -> str:
    with pytest.raises(RedKnotError) as caught:
        call(*words)
    line = one_line(caught.value)
    assert line.startswith("redknot: ")
    assert "\n" not in line
    return line


def test_what_is_read(options, tmp_path):
    assert options.model == NANO
    assert options.store is not None
    assert options.store.is_absolute()
    assert options.config == ServerConfig()


def test_nano_is_the_shipped_model_unless_there_is_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert model_path("nano") == NANO
    (tmp_path / "nano").mkdir()
    assert model_path("nano") == tmp_path / "nano"


def test_models_that_cannot_be_served(empty_store, tmp_path):
    def read(path: Path) -> None:
        Options.read(str(path), str(empty_store), "rowsparse", None)

    assert "no such folder; nothing is downloaded" in refusal(read, tmp_path / "absent")
    assert "no such folder" in refusal(read, NANO / "config.json")
    other = tmp_path / "other"
    other.mkdir()
    assert str(other) in refusal(read, other)
    (other / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    assert "llama" in refusal(read, other)
    (other / "config.json").write_text("{")
    assert "config.json" in refusal(read, other)


def test_stores_that_cannot_be_used(tmp_path):
    def read(store: str | None) -> None:
        Options.read(str(NANO), store, "rowsparse", None)

    assert "--redknot-store DIR" in refusal(read, None)
    with pytest.raises(StoreError):
        read(str(tmp_path / "absent"))
    assert not (tmp_path / "absent").exists()
    (tmp_path / "file").write_text("")
    refusal(read, str(tmp_path / "file"))
    (tmp_path / "folder").mkdir()
    refusal(read, str(tmp_path / "folder"))


def test_profiles_that_there_are_not(empty_store, tmp_path):
    def read(profile: str) -> None:
        Options.read(str(NANO), str(empty_store), profile, None)

    assert "sparserow" in refusal(read, "sparserow")
    (tmp_path / "bad.json").write_text("[]")
    assert "bad.json" in refusal(read, str(tmp_path / "bad.json"))
    for name in ("prefix", "fan-out"):
        assert f"profile {name}: " in refusal(read, str(ROOT / f"configs/profiles/{name}.json"))


def test_profiles_that_requests_may_name(empty_store, tmp_path):
    config = tmp_path / "config.json"
    plain = str(NANO.parents[1] / "configs" / "profiles" / "plain.json")
    config.write_text(json.dumps({"profiles": [plain]}))
    assert Options.read(str(NANO), str(empty_store), "turbo", str(config)).config.profiles == (plain,)
    config.write_text(json.dumps({"profiles": [plain, "none.json"]}))
    assert "none.json" in refusal(Options.read, str(NANO), str(empty_store), "turbo", str(config))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", ServerConfig()),
        ("# nothing\n", ServerConfig()),
        ("{}", ServerConfig()),
        ("namespace: mine", ServerConfig(namespace="mine")),
        ('{"shared_namespace": "all"}', ServerConfig(shared_namespace="all")),
        ("api_keys: {secret: mine}", ServerConfig(api_keys={"secret": "mine"})),
        ("read_timeout_s: 2", ServerConfig(read_timeout_s=2.0)),
        ("profiles: [a.json]", ServerConfig(profiles=("a.json",))),
    ],
)
def test_configuration_files(text, wanted, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert read_config(str(path)) == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("namespaces: mine", "namespaces: Extra inputs are not permitted"),
        ("namespace: ''", "namespace: String should have at least 1 character"),
        ("namespace: null", "namespace: Input should be a valid string"),
        ("shared_namespace: ''", "shared_namespace"),
        ("api_keys: [secret]", "api_keys: Input should be a valid dictionary"),
        ("api_keys: {'': mine}", "at least 1 character"),
        ("api_keys: {secret: ''}", "api_keys.secret"),
        ("api_keys: {1: mine}", "api_keys.1"),
        ("read_timeout_s: 0", "read_timeout_s"),
        ("read_timeout_s: -1", "read_timeout_s"),
        ("read_timeout_s: .inf", "read_timeout_s: Input should be a finite number"),
        ("read_timeout_s: .nan", "read_timeout_s"),
        ("read_timeout_s: soon", "read_timeout_s"),
        ("[]", "must be an object of options"),
        ("0", "must be an object of options"),
        ("false", "must be an object of options"),
        ("mine", "must be an object of options"),
        ("a: [", "line 1"),
        ("a: 2024-13-45", "month must be in 1..12"),
        ("\0", "special characters are not allowed"),
    ],
)
def test_configuration_files_that_are_wrong(text, said, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    line = refusal(read_config, str(path))
    assert f"--redknot-config {path}: " in line
    assert said in line


def test_configuration_files_that_cannot_be_read(tmp_path):
    assert "No such file or directory" in refusal(read_config, str(tmp_path / "absent"))
    assert "Is a directory" in refusal(read_config, str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "not text" in refusal(read_config, str(tmp_path / "binary"))


def test_the_four_options_parse():
    parser = ArgumentParser()
    add_arguments(parser)
    assert vars(parser.parse_args([])) == {
        "enable_redknot": False,
        "redknot_store": None,
        "redknot_profile": "rowsparse",
        "redknot_config": None,
    }
    words = "--enable-redknot --redknot-store a --redknot-profile turbo --redknot-config b"
    assert list(vars(parser.parse_args(words.split())).values()) == [True, "a", "turbo", "b"]


@pytest.mark.parametrize(("name", "meaning"), _REFUSED.items())
def test_features_that_are_refused(name, meaning):
    line = refusal(refuse_unsupported, arguments(**{name: "x"}))
    assert line == f"redknot: --{name.replace('_', '-')}: {meaning} cannot be used with --enable-redknot"


@pytest.mark.parametrize(("name", "meaning"), _ONE.items())
def test_sizes_that_are_refused(name, meaning):
    line = refusal(refuse_unsupported, arguments(**{name: 2}))
    assert line == f"redknot: --{name.replace('_', '-')}: {meaning} beyond 1 cannot be used with --enable-redknot"


def test_other_refusals():
    assert "--disaggregation-mode" in refusal(refuse_unsupported, arguments(disaggregation_mode="prefill"))
    for device in (None, "xpu", "CPU"):
        assert "serves with --device cpu" in refusal(refuse_device, device)


def test_sglang_has_the_fields_that_are_refused_and_its_defaults_pass(installed):
    assert {*_REFUSED, *_ONE, "disaggregation_mode", "api_key", "device"} <= set(installed.fields)
    refuse_unsupported(Namespace(**installed.fields | {"device": "cpu"}))
    refuse_unsupported(Namespace(**installed.defaults | {"device": "cpu"}))


def test_sglang_has_the_fields_that_are_set(options, installed):
    found = defaults(options, installed.fields)
    assert set(found) <= set(installed.fields)
    assert found == defaults(options, installed.defaults)  # of Engine(...) and of a command line


def test_defaults(options):
    assert defaults(options, {}) == {
        "model_path": str(NANO),
        "tokenizer_path": str(NANO),
        "served_model_name": "nano",
        "json_model_override_args": json.dumps({"architectures": [ARCHITECTURE]}),
        "dtype": "float32",
        "page_size": options.geometry.block_length,
        "context_length": MOST,
        "max_total_tokens": 4 * MOST,
        "max_running_requests": 16,
        "chunked_prefill_size": 2048,
        "attention_backend": "torch_native",
        "sleep_on_idle": True,
        "skip_server_warmup": False,
        "tool_call_parser": None,
    }


def test_a_server_with_api_keys_does_not_wait_for_a_warm_up_that_has_none(options):
    assert defaults(replace(options, config=ServerConfig(api_keys={"secret": "mine"})), {})["skip_server_warmup"]
    assert defaults(options, {"skip_server_warmup": True})["skip_server_warmup"]


def test_what_a_user_set_stays(options):
    given = {
        "tokenizer_path": "t",
        "served_model_name": "s",
        "context_length": 1024,
        "max_running_requests": 3,
        "chunked_prefill_size": -1,
        "tool_call_parser": "p",
        "json_model_override_args": '{"architectures": ["Other"], "a": 1}',
    }
    found = defaults(options, given)
    overrides = json.loads(found["json_model_override_args"])
    assert overrides == {"architectures": [ARCHITECTURE], "a": 1}
    assert {name: found[name] for name in given} == given | {
        "json_model_override_args": found["json_model_override_args"]
    }
    assert found["max_total_tokens"] == 8192


def test_the_chat_encoding_follows_from_the_tokenizer(options, tmp_path):
    def of(text: str) -> object:
        (tmp_path / "tokenizer.json").write_text(text)
        return defaults(replace(options, model=tmp_path), {})["tool_call_parser"]

    assert of('{"added_tokens": [{"content": "<｜begin▁of▁sentence｜>"}]}') == "deepseekv4"
    assert of('{"added_tokens": [{"content": "<s>"}]}') is None
    assert of("{}") is None
    assert of("{") is None


@given(chunk=st.none() | st.integers(-10, 100_000), pool=st.none() | st.integers(1, 10**7))
def test_pages_are_whole(options, chunk, pool):
    found = defaults(options, {"chunked_prefill_size": chunk, "max_total_tokens": pool})
    page = options.geometry.block_length
    assert found["max_total_tokens"] % page == 0
    assert found["max_total_tokens"] >= (pool or 0)
    size = found["chunked_prefill_size"]
    assert size == chunk if chunk is not None and chunk <= 0 else size >= page and size % page == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"context_length": MOST + 1}, f"--context-length {MOST + 1}: the model has {MOST} positions"),
        ({"context_length": -1}, "--context-length -1"),
        ({"page_size": 1}, "--page-size 1: this model is served with"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16: this model is served with float32"),
        ({"attention_backend": "triton"}, "--attention-backend triton: this model is served with torch_native"),
        ({"json_model_override_args": "{"}, "--json-model-override-args must be an object in JSON"),
        ({"json_model_override_args": "[]"}, "--json-model-override-args must be an object in JSON"),
    ],
)
def test_fields_that_the_model_decides(options, given, said):
    assert said in refusal(defaults, options, given)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_saying_what_the_model_decides_is_no_mistake(options, dtype):
    page = options.geometry.block_length
    defaults(options, {"dtype": dtype, "page_size": page, "attention_backend": "torch_native"})


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the platform's entry point leaves a process; nothing of it stays."""
    monkeypatch.setattr(environment, "enabled", lambda: True)
    monkeypatch.setattr(environment, "enable_cpu", lambda tp_size: None)


def adapted(options: Options, **changes: object) -> Namespace:
    args = Namespace(**{"device": "cpu", "tp_size": 1, "api_key": None} | changes)
    launch.adapt(args, options, vars(args))
    return args


def test_options_travel_with_the_arguments(options, prepared):
    args = adapted(options)
    assert launch.options_of(args) is options
    assert args.dtype == "float32"


def test_a_process_that_was_not_prepared_is_refused(options, monkeypatch):
    monkeypatch.setattr(environment, "enabled", lambda: False)
    assert "write --device cpu in full" in refusal(lambda: adapted(options))


@pytest.mark.parametrize(
    ("name", "value", "passes"),
    [
        ("SGLANG_RUST_SERVER", "1", False),
        ("SGLANG_RUST_SERVER", "True", False),
        ("SGLANG_RUST_SERVER", "0", True),
        ("SGLANG_RUST_SERVER", "false", True),
        ("SGLANG_GRPC_PORT", "50051", False),
    ],
)
def test_servers_that_no_hook_reaches_are_refused(options, prepared, monkeypatch, name, value, passes):
    monkeypatch.setenv(name, value)
    if passes:
        adapted(options)
    else:
        assert f"{name} cannot be used" in refusal(lambda: adapted(options))


def test_two_kinds_of_api_keys_are_refused(options, prepared):
    keyed = replace(options, config=ServerConfig(api_keys={"secret": "mine"}))
    adapted(keyed)
    adapted(options, api_key="x")
    assert "--api-key" in refusal(lambda: adapted(keyed, api_key="x"))


def test_a_mistake_on_the_command_line_is_one_line(monkeypatch, capsys):
    def no(*_: object) -> None:
        raise AssertionError("SGLang went on")

    args = arguments(enable_redknot=True, model_path="absent", redknot_store=None)
    args.redknot_profile, args.redknot_config = "rowsparse", None
    with pytest.raises(SystemExit) as caught:
        launch.from_cli_args(no, object, args)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said == "redknot: --model-path absent: no such folder; nothing is downloaded with --enable-redknot\n"
    with pytest.raises(SystemExit):
        launch.from_cli_args(no, object, arguments(enable_redknot=False))
    assert "--enable-redknot is not given" in capsys.readouterr().err


def test_one_line():
    assert one_line(ConfigError("a\n  b\tc")) == "redknot: a b c"
