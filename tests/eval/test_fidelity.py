"""Arms against recompute inside the model: what is compared, by hand and against itself, and the tool around it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.arguments import guarded
from eval.artifacts import targets
from eval.encoded import Encoded, encoded
from eval.encoder import Encoder
from eval.fidelity.__main__ import parser, run
from eval.fidelity.compare import Trace, difference, noise_floor, query_rows, recomputed, reused, traces
from eval.fidelity.prompts import Draw, corpus_set, load_corpus, nano_sets
from eval.fidelity.work import summary
from eval.names import NOISE_FLOOR
from eval.results import Fidelity, read_results
from redknot.build.inmemory import in_memory, restored_request
from redknot.errors import InputError
from redknot.model.checkpoint import load_model
from redknot.model.profile import RECOMPUTE, SHIPPED, Profile
from redknot.nano.worlds import TASKS
from redknot.plan.rows import KnownRun
from redknot.runtime.counters import Counters
from redknot.runtime.model import Model
from redknot.runtime.prefill import prefill
from redknot.runtime.restore import Source
from redknot.runtime.reuse import prefill_reusing
from tests.kit.corpus import write_corpus
from tests.kit.heads import mixed_table
from tests.kit.memory import nan_memory
from tests.kit.requests import document, use_cache, write_checkpoint
from tests.kit.rows import poisoned_session, widest

DOCS = [document(length, number) for number, length in enumerate((96, 130))]
QUESTION = document(21, 9)
PROMPT = encoded([([0], False), (DOCS[0], True), (DOCS[1], True), (QUESTION, False)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    patch = use_cache(tmp_path_factory.mktemp("cache"))
    yield write_checkpoint(tmp_path_factory.mktemp("fidelity") / "model")
    patch.undo()


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    return Model(*load_model(checkpoint))


@pytest.fixture(scope="module")
def reference(model: Model) -> Trace:
    return recomputed(model, PROMPT)


def through(model: Model, prompt: Encoded, *profiles: Profile) -> list[Trace]:
    by_name = {profile.name: profile for profile in profiles}
    return list(traces(model, prompt, by_name, targets(model.geometry, profiles, 1)).values())


def test_recompute_is_itself(model, reference):
    (again,) = through(model, PROMPT, RECOMPUTE)
    far = difference(reference, again)
    assert far.layers == (0.0,) * model.geometry.num_layers
    assert (far.kl, far.top1) == (0.0, 1.0)


def test_a_trace_is_of_the_rows_behind_the_documents(model, reference):
    assert query_rows(PROMPT) == len(QUESTION)
    assert reference.logits.shape == (len(QUESTION), model.geometry.vocab_size)
    width = model.geometry.hc_mult * model.geometry.hidden_size
    assert [tuple(hidden.shape) for hidden in reference.hidden] == [(len(QUESTION), width)] * model.geometry.num_layers
    ids = torch.from_numpy(PROMPT.token_ids).long()
    last = prefill(model, [poisoned_session(model, len(ids))], [ids], Counters())[0]
    assert widest(reference.logits[-1], last) <= 1e-4


def test_the_noise_floor_is_rounding_and_not_nothing(model, reference):
    far = difference(reference, noise_floor(model, PROMPT))
    assert 0 < max(far.layers) < 1e-4
    assert far.kl < 1e-6
    assert far.top1 == 1.0


def test_arms_differ_from_recompute_by_more_than_noise(model, reference):
    table = SHIPPED["headsplit"].model_copy(update={"name": "table", "head_table": mixed_table(model.geometry)})
    noise = max(difference(reference, noise_floor(model, PROMPT)).layers)
    profiles = [SHIPPED[name] for name in ("headsplit", "combined", "rowsparse", "turbo")]
    found = through(model, PROMPT, *profiles, table)
    assert len(found) == 5
    for trace in found:
        far = difference(reference, trace)
        assert max(far.layers) > 100 * noise
        assert far.kl > 0
        assert all(math.isfinite(layer) for layer in far.layers)
    assert not torch.equal(found[0].logits, found[-1].logits)  # two tables, two artifacts


@pytest.mark.parametrize("name", ["rowsparse", "headsplit"])
def test_an_arm_is_what_the_runtime_runs(model, name):
    """The last row's logits are those of a prefill over the same artifacts."""
    profile, ids = SHIPPED[name], torch.from_numpy(PROMPT.token_ids).long()
    (target,) = targets(model.geometry, [profile], 1)
    made = in_memory(model, target, [torch.tensor(one) for one in DOCS])
    sources = [
        Source(KnownRun(str(at), start, 0, stop - start, stop - start), made[at])
        for at, (start, stop) in enumerate(PROMPT.spans)
    ]
    memory = nan_memory(model.geometry)
    session, rows = restored_request(model, memory, sources, ids, profile)
    expected = prefill_reusing(model, session, sources, rows, ids, profile, Counters(), chunk=100)
    (trace,) = through(model, PROMPT, profile)
    assert widest(trace.logits[-1], expected) <= 1e-4


@pytest.mark.parametrize(
    ("parts", "rows"),
    [
        ([([0], False), (QUESTION, False)], 1 + len(QUESTION)),
        ([([0], False), (DOCS[0], True)], 1),
        ([([0], False), (DOCS[0], True), (QUESTION[:1], False)], 1),
    ],
    ids=["no documents", "ends with a document", "one row"],
)
def test_odd_prompts(model, parts, rows):
    prompt = encoded(parts)
    assert query_rows(prompt) == rows
    (trace,) = through(model, prompt, SHIPPED["turbo"])
    far = difference(recomputed(model, prompt), trace)
    assert len(trace.logits) == rows
    assert (max(far.layers) == 0) == (not prompt.spans)


def test_a_difference_by_hand():
    reference = Trace((torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)), torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    other = Trace((torch.tensor([[3.0, 4.5]]), torch.tensor([[0.0, 2.0]])), torch.tensor([[0.0, 1.0], [2.0, 0.0]]))
    far = difference(reference, other)
    assert far.layers == pytest.approx((0.1, 2.0))
    e = math.e
    first = 0.5 * math.log(0.5 * (1 + e)) + 0.5 * math.log(0.5 * (1 + e) / e)
    p = e / (1 + e)
    second = p * math.log(p * (1 + e * e) / (e * e)) + (1 - p) * math.log((1 - p) * (1 + e * e))
    assert far.kl == pytest.approx((first + second) / 2)
    assert far.top1 == 0.5


def record(**changes: Any) -> Fidelity:
    fields = {"run": "r", "dataset": "d", "item": "0", "arm": "a", "prompt_tokens": 9, "kl": 0.5, "top1": 1.0}
    return Fidelity(**(fields | {"layers": (0.1, 0.3, 0.2)} | changes))


def test_a_summary_has_the_means():
    lines = summary([record(), record(item="1", kl=1.5, top1=0.5, layers=(0.3, 0.1, 0.2)), record(arm="b")])
    assert [(line.arm, line.prompts, line.kl, line.top1) for line in lines] == [("a", 2, 1.0, 0.75), ("b", 1, 0.5, 1.0)]
    assert lines[0].layers == pytest.approx((0.2, 0.2, 0.2))
    assert lines[1].worst_layer == 1
    assert summary([]) == []


def test_prompts_of_a_corpus(checkpoint, tmp_path):
    encoder = Encoder.load(checkpoint)
    folder = write_corpus(tmp_path / "texts", [60, 90, 40, 200])
    (folder / "bad.txt").write_bytes(b"\xff")
    corpus = load_corpus(folder, encoder)
    assert len(corpus.left_out) == 1
    draw = Draw(prompts=6, tokens=190, documents=2, seed=4)
    items = list(corpus_set(corpus, encoder, draw, "\nAnswer:").items())
    prompts = [encoder.encode(item) for item in items]
    assert [item.id for item in items] == [str(number) for number in range(6)]
    assert all(len(prompt) <= 190 for prompt in prompts)
    assert all(1 <= len(prompt.spans) <= 2 for prompt in prompts)
    assert len({prompt.sha256 for prompt in prompts}) > 1
    fewer = corpus_set(corpus, encoder, Draw(3, 190, 2, 4), "\nAnswer:").items()
    assert [encoder.encode(item).sha256 for item in fewer] == [prompt.sha256 for prompt in prompts[:3]]
    with pytest.raises(InputError, match="the shortest document has 40"):
        corpus_set(corpus, encoder, Draw(1, 42, 2, 0), "\nAnswer:")


def test_prompts_of_nanos_tasks(checkpoint):
    encoder = Encoder.load(checkpoint)
    sets = nano_sets(checkpoint, encoder, Draw(prompts=2, tokens=500, documents=3, seed=4))
    assert [dataset.name for dataset in sets] == list(TASKS)
    for dataset in sets:
        prompts = [encoder.encode(item) for item in dataset.items()]
        assert [(len(prompt), len(prompt.spans)) for prompt in prompts] == [(500, 3)] * 2
        assert all(query_rows(prompt) > 1 for prompt in prompts)


@pytest.fixture
def fidelity(checkpoint, tmp_path, monkeypatch, capsys):
    """The tool over a small corpus: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "texts", [60, 90, 40])

    def call(*options: object) -> tuple[int, str, str]:
        capsys.readouterr()
        given = ["--model", checkpoint, "--out", "out", "--corpus", "texts", "--tokens", 200, *options]
        code = guarded(parser(), run, [str(word) for word in given])
        return (code, *capsys.readouterr())

    return call


def records(folder: Path) -> list[Fidelity]:
    return [one for one in read_results(folder / "out" / "results.jsonl") if isinstance(one, Fidelity)]


def test_a_run_goes_on_where_it_was_cut(fidelity, tmp_path):
    few = ("--arms", "recompute,turbo", "--prompts", 2)
    code, out, err = fidelity(*few)
    assert (code, err) == (0, "")
    assert "noise-floor" in out
    first = records(tmp_path)
    assert {(one.item, one.arm) for one in first} == {
        (item, arm) for item in "01" for arm in (NOISE_FLOOR, "recompute", "turbo")
    }
    for one in first:
        assert (one.arm == "recompute") == (max(one.layers) == 0)
    path = tmp_path / "out" / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-20])  # killed while it wrote
    assert fidelity(*few)[0] == 0
    assert records(tmp_path) == [*first[:-1], first[-1].model_copy(update={"run": records(tmp_path)[-1].run})]
    size = path.stat().st_size
    code, out, _ = fidelity(*few, "--json")
    assert path.stat().st_size == size
    assert [line["arm"] for line in json.loads(out)["arms"]] == [NOISE_FLOOR, "recompute", "turbo"]
    assert fidelity("--arms", "turbo,rowsparse", "--prompts", 3)[0] == 0
    assert {one.item for one in records(tmp_path) if one.arm == "rowsparse"} == {"0", "1", "2"}
    code, _, err = fidelity(*few, "--seed", 7)
    assert code == 2
    assert "out holds results of another run: option seed differ" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arms", "nothing"], "arm 'nothing' is neither a file nor one of"),
        (["--model", "nowhere"], "no such folder; nothing is downloaded"),
        (["--corpus", "nowhere"], "there is no folder or file nowhere"),
        (["--tokens", 20], "the shortest document has 40"),
        (["--arms", "noise.json"], "the name 'noise-floor' is taken"),
        (["--arms", "wide.json"], "arm wide does not fit the model"),
    ],
    ids=str,
)
def test_refusals(fidelity, tmp_path, options, message):
    (tmp_path / "noise.json").write_text('{"name": "noise-floor"}')
    (tmp_path / "wide.json").write_text('{"name": "wide", "fence_layers": 9}')
    code, out, err = fidelity(*options)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_reuse_needs_an_artifact_for_each_document(model):
    with pytest.raises(ValueError, match="zip"):
        reused(model, PROMPT, [], SHIPPED["turbo"])
