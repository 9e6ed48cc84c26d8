"""Requests in a rank: the branch of the radix tree, what a client can ask for, and what becomes of a refusal."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redknot.errors import InputError
from redknot.serving.batch import Admission, Ask
from sglang_patches import pages, requests, responses, serving
from sglang_patches.requests import ARRIVED, NAMESPACE, REQUESTS, _joined, aborted, create, release, with_requests

KEY = st.none() | st.text(alphabet="ab1:+-é", max_size=6)


@given(st.tuples(KEY, KEY), st.tuples(KEY, KEY))
def test_two_keys_are_never_one(one, other):
    assert (_joined(*one) == _joined(*other)) == (one == other)


@given(KEY, st.text(min_size=1))
def test_no_client_can_name_a_branch(own, branch):
    """Pages on a branch are approximate; a client's own key must not lead to them, nor to the exact ones."""
    assert _joined(own, None) != _joined(None, branch)
    assert (_joined(own, None) is None) == (own is None)


class Request:
    """What SGLang makes of a request, as far as hooks look at it."""

    def __init__(self, rid: str = "r", custom: Any = None, key: str | None = None) -> None:
        self.rid, self.extra_key, self.cache_salt = rid, key, None
        self.origin_input_ids = [1, 2, 3]
        self.sampling_params = SimpleNamespace(custom_params=custom)
        self.aborted: str | None = None
        self.status = 0

    def set_finish_with_abort(self, message: str, status: int = 400, kind: str = "BadRequestError") -> None:
        self.aborted, self.status = message, int(status)

    def finished(self) -> bool:
        return self.aborted is not None


class Engine:
    """Admits every request to one branch."""

    def __init__(self, branch: str | None = "branch", error: Exception | None = None) -> None:
        self.branch, self.error = branch, error
        self.admitted: list[tuple[str, Ask, str | None, float | None]] = []
        self.released: list[tuple[str, bool]] = []
        self.freed: list[int] = []
        self.cleared = 0

    def admit(
        self, rid: str, ids: list[int], ask: Ask, *, namespace: str | None, arrived: float | None, **_: Any
    ) -> Admission:
        if self.error is not None:
            raise self.error
        self.admitted.append((rid, ask, namespace, arrived))
        return Admission(self.branch)

    def release(self, rid: str, ended: bool = True, admission: Admission | None = None) -> None:
        self.released.append((rid, ended))

    def free_pages(self, numbers: list[int]) -> None:
        self.freed += numbers

    def clear_pages(self) -> None:
        self.cleared += 1


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine | None], None]:
    return lambda engine: monkeypatch.setattr(serving, "_engine", engine)


def made(request: Request) -> Request:
    return create(lambda *_, **__: request, SimpleNamespace(tree_cache=None), object())


def test_a_request_is_admitted_to_its_branch(serve):
    engine = Engine()
    serve(engine)
    request = made(Request(custom={"redknot": {"reuse": "required"}, NAMESPACE: "mine", ARRIVED: 2.5}, key="own"))
    assert engine.admitted == [("r", Ask(reuse="required"), "mine", 2.5)]
    assert request.extra_key == _joined("own", "branch")
    assert request.aborted is None


def test_an_exact_request_without_a_key_has_none(serve):
    serve(Engine(branch=None))
    assert made(Request()).extra_key is None


def test_sglangs_own_requests_reuse_nothing(serve):
    engine = Engine()
    serve(engine)
    made(Request(rid="HEALTH_CHECK_1", custom={"redknot": {"reuse": "required"}}))
    assert engine.admitted[0][1] == Ask(reuse="off")


def test_a_refusal_ends_the_request_alone(serve):
    engine = Engine(error=InputError("no document"))
    serve(engine)
    request = made(Request())
    assert (request.aborted, request.status) == ("no document", 400)
    assert made(Request(custom={"redknot": {"reuse": "often"}})).aborted is not None


def test_a_fault_of_ours_ends_the_request_alone(serve):
    serve(Engine(error=KeyError("x")))
    request = made(Request())
    assert (request.aborted, request.status) == ("KeyError: 'x'", 500)


def test_a_request_that_vanishes_is_released(serve):
    engine = Engine()
    serve(engine)
    request = made(Request(rid="gone"))
    assert engine.released == []
    del request
    gc.collect()
    assert engine.released == [("gone", True)]


def test_a_request_that_is_aborted_while_it_waits_is_released(serve):
    engine = Engine()
    serve(engine)
    aborted(object(), Request(rid="waits"))
    assert engine.released == [("waits", True)]


def test_retraction_is_told_from_an_end(serve):
    engine = Engine()
    serve(engine)
    request = Request()
    release(request, object(), checkpoint=False)
    request.set_finish_with_abort("over")
    release(request, object(), checkpoint=True)
    assert engine.released == [("r", False), ("r", True)]


def test_pages_that_are_freed_are_told(serve):
    import torch

    engine = Engine()
    serve(engine)
    pages.freed(object(), torch.tensor([3, 4]), torch.tensor([], dtype=torch.int64), torch.tensor([7]))
    pages.cleared(object())
    assert (engine.freed, engine.cleared) == ([3, 4, 7], 1)


def test_nothing_happens_before_the_model_is_loaded(serve):
    serve(None)
    request = Request(key="own")
    assert made(request) is request
    assert request.extra_key == "own"
    release(request)
    aborted(object(), request)
    pages.cleared(object())
    assert pages.freed(object()) is None


def test_a_batch_carries_its_requests_beside_what_it_carried():
    batch = SimpleNamespace(reqs=[1, 2])
    for states, wanted in ((None, {}), ({"other": 3}, {"other": 3})):
        result = with_requests(SimpleNamespace(model_specific_states=states), object, batch, object())
        assert result.model_specific_states == wanted | {REQUESTS: [1, 2]}


def test_a_failed_request_leaves_no_pages_in_the_tree(monkeypatch):
    import sys

    abort = SimpleNamespace(FINISH_ABORT=lambda message, status: (message, int(status)))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.schedule_batch", abort)
    request = Request()
    requests.fail(request, "a rank failed")
    assert request.discard_output_reason == request.to_finish == ("a rank failed", 500)
    assert request.skip_radix_cache_insert is True


def test_only_our_key_is_one_of_the_request():
    assert responses.is_request_level(lambda *_: False, object(), responses.KEY)
    assert not responses.is_request_level(lambda *_: False, object(), "other")
    assert responses.is_request_level(lambda *_: True, object(), "other")
