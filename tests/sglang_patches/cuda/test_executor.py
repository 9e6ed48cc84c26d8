"""A batch between the native model and the engine, with stand-ins for both: who runs what, and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from redknot.serving.batch import Admission, Outcome, Piece
from sglang_patches import serving
from sglang_patches.cuda import requests
from sglang_patches.cuda.executor import Executor
from sglang_patches.cuda.models import deepseek_v4
from sglang_patches.cuda.requests import can_run_graph, is_ours, keep_apart, native_report
from sglang_patches.requests import ADMISSION, REQUESTS

VOCAB = 5
OURS, NATIVE = 2.0, 1.0


class Engine:
    """Says OURS of every row; fails the requests that it is told to."""

    page_tokens = 128

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.failing: set[str] = set()
        self.kept: set[int] = set()
        self.freed: list[int] = []
        self.released: list[str] = []
        self.cleared = 0
        self.counts: dict[str, Callable[[], dict[str, int]]] = {}
        self.metrics = SimpleNamespace(watch=self.counts.__setitem__)

    def forward(self, pieces: list[Piece]) -> Outcome:
        self.pieces += pieces
        reports = {piece.request_id: {"arm": "reuse"} for piece in pieces if piece.final}
        failures = {piece.request_id: "it broke" for piece in pieces if piece.request_id in self.failing}
        return Outcome(torch.full((len(pieces), VOCAB), OURS), failures, reports)

    def has_page(self, page: int) -> bool:
        return page in self.kept

    def free_pages(self, pages: list[int]) -> None:
        self.freed += pages

    def clear_pages(self) -> None:
        self.cleared += 1

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


def request(rid: str, *, reuses: bool | None, tokens: int = 600, answered: int = 0) -> Any:
    known = list(range(tokens + answered))
    made = SimpleNamespace(
        rid=rid, origin_input_ids=known[:tokens], output_ids=known[tokens:], full_untruncated_fill_ids=known
    )
    if reuses is not None:
        setattr(made, ADMISSION, Admission("branch" if reuses else None, reuses, None if reuses else "no_match", "why"))
    return made


def batch(held: list[Any], *, decode: bool = False, start: int = 0) -> tuple[Any, Tensor]:
    """Whole prefills from ``start`` on, or the last token of each."""
    stops = [len(one.full_untruncated_fill_ids) for one in held]
    mode = SimpleNamespace(is_decode=lambda: decode, is_extend=lambda: not decode)
    made = SimpleNamespace(
        forward_mode=mode,
        model_specific_states={REQUESTS: held},
        seq_lens_cpu=torch.tensor(stops),
        extend_prefix_lens_cpu=[start] * len(held),
        extend_seq_lens_cpu=[stop - start for stop in stops],
        req_pool_indices=torch.arange(len(held)),
        return_logprob=False,
    )
    rows = len(held) if decode else sum(made.extend_seq_lens_cpu)
    return made, torch.arange(rows)


class Model:
    """The native model: NATIVE in every logit, in bf16."""

    def __init__(self) -> None:
        self.ran = 0

    def __call__(self, rows: int) -> Callable[[], Any]:
        def run() -> Any:
            self.ran += 1
            logits = torch.full((rows, VOCAB), NATIVE, dtype=torch.bfloat16)
            return SimpleNamespace(next_token_logits=logits, customized_info={"other": [0] * rows})

        return run


@pytest.fixture
def engine() -> Engine:
    return Engine()


def run(engine: Engine, held: list[Any], **more: Any) -> tuple[Any, Model, dict[str, int]]:
    model, executor = Model(), Executor(engine)  # type: ignore[arg-type]
    made, ids = batch(held, **more)
    output = executor.run(model(len(held)), made, ids)
    return output, model, engine.counts["native"]()


def test_a_native_batch_is_not_touched(engine, sglang):
    output, model, counts = run(engine, [request("a", reuses=False), request("health", reuses=None)])
    assert model.ran == 1
    assert engine.pieces == []
    assert bool((output.next_token_logits == NATIVE).all())
    report = {"arm": "dense", "reason": "no_match", "detail": "why", "prompt_tokens": 600}
    assert output.customized_info == {"other": [0, 0], "redknot": [report, None]}
    assert (counts["rows"], counts["rows_ours"], counts["rows_shadowed"]) == (1200, 0, 0)


def test_a_batch_of_ours_never_reaches_the_native_model(engine, sglang):
    sglang.slots[0, :600] = torch.arange(600) + 3 * 256
    output, model, counts = run(engine, [request("a", reuses=True)])
    assert model.ran == 0
    (piece,) = engine.pieces
    assert (piece.start, piece.stop, piece.final) == (0, 600, True)
    assert piece.pages == [6, 7, 8, 9, 10]  # each of SGLang's pages of 256 holds two of 128
    assert torch.equal(piece.token_ids, torch.arange(600))
    assert bool((output.next_token_logits == OURS).all())
    assert output.customized_info == {"redknot": [{"arm": "reuse"}]}
    assert (counts["rows"], counts["rows_ours"], counts["rows_shadowed"]) == (0, 600, 0)


def test_decode_steps_of_both_kinds_run_together_and_ours_are_replaced(engine, sglang):
    held = [request(name, reuses=name == "b", answered=1) for name in "abc"]
    output, model, counts = run(engine, held, decode=True)
    assert model.ran == 1
    assert [(piece.request_id, piece.start, piece.stop) for piece in engine.pieces] == [("b", 600, 601)]
    assert torch.equal(engine.pieces[0].token_ids, torch.tensor([1]))
    assert output.next_token_logits.dtype == torch.bfloat16
    assert output.next_token_logits[:, 0].tolist() == [NATIVE, OURS, NATIVE]
    assert output.customized_info["redknot"] == [None, {"arm": "reuse"}, None]
    assert (counts["rows"], counts["rows_ours"], counts["rows_shadowed"]) == (2, 1, 1)


def test_an_error_is_its_requests_alone(engine, sglang):
    engine.failing = {"b"}
    held = [request("a", reuses=True), request("b", reuses=True)]
    run(engine, held)
    assert not hasattr(held[0], "to_finish")
    assert held[1].to_finish == held[1].discard_output_reason == "500 it broke"
    assert held[1].skip_radix_cache_insert is True


def test_a_batch_that_nobody_asked_for_is_native(engine, sglang):
    """SGLang's own, before it serves: it has no requests."""
    model, executor = Model(), Executor(engine)
    made = SimpleNamespace(model_specific_states=None)
    assert bool((executor.run(model(1), made, torch.zeros(3)).next_token_logits == NATIVE).all())
    assert model.ran == 1


def test_the_model_runs_native_until_its_weights_are_there(engine, sglang, monkeypatch):
    class Native:
        def __init__(self) -> None:
            self.loaded = 0

        def load_weights(self, weights: Any, is_nextn: bool = False) -> str:
            self.loaded += 1
            return "loaded"

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return SimpleNamespace(next_token_logits=torch.full((1, VOCAB), NATIVE), customized_info=None, args=args)

    starts: list[Any] = []
    monkeypatch.setattr(serving, "start", lambda **more: starts.append(more) or engine)
    model_class = deepseek_v4.extended(Native)
    assert model_class.__name__ == "DeepseekV4ForCausalLM"
    model = model_class()
    made, ids = batch([request("a", reuses=True)])
    assert float(model.forward(ids, ids, made).next_token_logits.max()) == NATIVE
    assert model.load_weights([]) == model.load_weights([]) == "loaded"  # a refit loads again
    assert starts == [{"device": "cuda"}]
    assert float(model.forward(ids, ids, made).next_token_logits.max()) == OURS
    other, rows = batch([request("b", reuses=False)])
    found = model.forward(rows, rows, other, None, None)
    assert found.args == (rows, rows, other, None, None)


def test_a_module_without_sglang_has_no_class_and_says_so(sglang):
    with pytest.raises(ImportError):
        deepseek_v4.EntryClass  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        deepseek_v4.Other  # noqa: B018


# Hooks.


def test_a_native_answer_is_reported_until_it_decodes():
    assert native_report(request("a", reuses=None)) is None
    assert native_report(request("a", reuses=False)) is not None
    assert native_report(request("a", reuses=False, answered=1)) is None


def test_prefills_of_two_kinds_wait_for_each_other(sglang):
    def original(adder: Any, one: Any, *args: Any) -> str:
        return f"took {one.rid} {args}"

    ours, native = request("a", reuses=True), request("b", reuses=False)
    for chosen, one, taken in (
        ([], ours, True),
        ([ours], ours, True),
        ([ours], native, False),
        ([native], ours, False),
        ([native], native, True),
    ):
        found = keep_apart(original, SimpleNamespace(can_run_list=chosen), one, False, None)
        assert found == (f"took {one.rid} (False, None)" if taken else sglang.AddReqResult.OTHER)


@pytest.mark.parametrize("answer", [True, False])
def test_a_graph_runs_only_native_batches(answer):
    def original(runner: Any, made: Any) -> bool:
        return answer

    ours, native = request("a", reuses=True), request("b", reuses=False)
    assert can_run_graph(original, None, batch([native])[0]) is answer
    assert can_run_graph(original, None, SimpleNamespace(model_specific_states=None)) is answer
    assert can_run_graph(original, None, batch([native, ours])[0]) is False


def scheduler_of(allocator: Any) -> Any:
    return SimpleNamespace(tree_cache=SimpleNamespace(page_size=256), token_to_kv_pool_allocator=allocator)


@pytest.fixture
def admitted(engine, monkeypatch) -> Callable[..., Any]:
    """Make a request through the hook; what the tree has is given in SGLang's pages."""
    monkeypatch.setattr(requests, "engine", lambda: engine)
    monkeypatch.setattr(requests, "_tokens", None)

    def make(scheduler: Any, *, reuses: bool | None, cached: tuple[int, ...] = ()) -> tuple[Any, list[int]]:
        seen: list[int] = []

        def stand_in(original: Any, one: Any, received: Any, args: Any, kwargs: Any, pages_of: Any) -> Any:
            monkeypatch.setattr(requests.requests, "cached", lambda *_: list(cached))
            seen.extend(pages_of(one, [], None, None))
            return request("r", reuses=reuses)

        monkeypatch.setattr(requests.requests, "make", stand_in)
        return requests.create(None, scheduler, None), seen

    return make


def test_a_request_that_reuses_nothing_is_given_back_at_once(engine, admitted):
    allocator = SimpleNamespace(full_attn_allocator=object())
    one, _ = admitted(scheduler_of(allocator), reuses=False)
    assert not is_ours(one)
    assert engine.released == ["r"]
    one, _ = admitted(scheduler_of(allocator), reuses=True)
    assert is_ours(one)
    assert engine.released == ["r"]
    one, _ = admitted(scheduler_of(None), reuses=None)  # refused: it was never admitted
    assert not is_ours(one)


def test_of_a_prefix_only_pages_of_the_engine_count(engine, admitted):
    engine.kept = {4, 5, 6, 20}
    allocator = SimpleNamespace(full_attn_allocator=object())
    assert admitted(scheduler_of(allocator), reuses=True, cached=(2, 3, 10))[1] == [4, 5, 6]
    assert admitted(scheduler_of(allocator), reuses=True, cached=(1, 2))[1] == []


def test_pages_of_windows_are_not_pages_of_tokens(engine, admitted):
    tokens, windows = (SimpleNamespace(page_size=256) for _ in range(2))
    requests.freed(tokens, torch.tensor([1]))  # nothing of ours can be there yet
    admitted(scheduler_of(SimpleNamespace(full_attn_allocator=tokens)), reuses=True)
    requests.freed(windows, torch.tensor([1, 2]))
    requests.cleared(windows)
    assert (engine.freed, engine.cleared) == ([], 0)
    requests.freed(tokens, torch.tensor([3]), torch.tensor([7]))
    requests.cleared(tokens)
    assert (engine.freed, engine.cleared) == ([6, 7, 14, 15], 1)
