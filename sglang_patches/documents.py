"""Routes below /redknot: the documents that requests may reuse, builds of new ones, and whether reuse is on."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field

from redknot.artifact.rows import ArtifactRow
from redknot.artifact.store import ArtifactStore
from redknot.errors import StoreError
from sglang_patches.builds import Builds
from sglang_patches.options import Options
from sglang_patches.requests import NAMESPACE

_MOST_DOCUMENTS = 1024  # of one build
_MOST_CHARACTERS = 2**26


class NewDocument(BaseModel):
    """One document to build."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=512)]
    text: Annotated[str, Field(min_length=1, max_length=_MOST_CHARACTERS)]


class NewDocuments(BaseModel):
    """The body of a build."""

    model_config = ConfigDict(extra="forbid")

    documents: Annotated[list[NewDocument], Field(min_length=1, max_length=_MOST_DOCUMENTS)]


class _Route(APIRoute):
    """A body that does not parse gets one line; the usual answers repeat it, and fail where it is not text."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        original = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await original(request)
            except RequestValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"])
                raise HTTPException(422, f"{where}: {first['msg']}") from None

        return handler


class Documents:
    """The documents of a server as its clients see them: those of their namespace, and the shared ones."""

    def __init__(self, options: Options, tp_size: int, tokenizer_manager: Any) -> None:
        assert options.store is not None  # the command line was refused otherwise
        self.store = ArtifactStore(options.store)
        self.builds = Builds(options.model, options.store, options.profile, tp_size)
        self.options = options
        self.manager = tokenizer_manager

    def namespace(self, request: Request) -> str:
        """Whose documents a request may change."""
        found: str | None = request.scope.get(NAMESPACE)
        return self.options.config.namespace if found is None else found

    def visible(self, request: Request) -> list[ArtifactRow]:
        """What a request may see, its own first."""
        namespaces = dict.fromkeys([self.namespace(request), self.options.config.shared_namespace])
        return [row for namespace in namespaces if namespace is not None for row in self.store.list(namespace)]

    def find(self, request: Request, artifact_id: str) -> ArtifactRow:
        """One of them; 404 where there is none, whether or not somebody else has it."""
        for row in self.visible(request):
            if row.artifact_id == artifact_id:
                return row
        raise HTTPException(404, f"there is no document {artifact_id[:64]}")

    def to_dict(self, row: ArtifactRow) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "artifact_id": row.artifact_id,
            "names": list(self.store.names(row.artifact_id, row.namespace)),
            "namespace": row.namespace,
            "tokens": row.token_count,
            "bytes": row.nbytes,
            "tp_size": row.world,
            "generation": row.generation,
            "state": str(row.state),
            "needs": list(row.needs),
            "created": row.created,
        }


def router(documents: Documents) -> APIRouter:
    """The routes. Plain functions: what they ask the disk for runs on threads."""
    routes = APIRouter(prefix="/redknot", route_class=_Route)

    @routes.get("/health")
    async def health(request: Request) -> dict[str, Any]:
        states = await documents.manager.get_internal_state()
        state: dict[str, Any] = states[0].get("redknot", {}) if states else {}
        return {"profile": documents.options.profile, "store": str(documents.options.store)} | state

    @routes.get("/documents")
    def list_documents(request: Request) -> dict[str, Any]:
        return {"documents": _rows(documents, documents.visible(request))}

    @routes.get("/documents/{artifact_id}")
    def show_document(request: Request, artifact_id: str) -> dict[str, Any]:
        row = documents.find(request, artifact_id)
        faults = documents.store.quarantined(artifact_id)
        found = [{"section": fault.section, "file": fault.file, "reason": fault.reason} for fault in faults]
        return documents.to_dict(row) | {"faults": found}

    @routes.post("/documents", status_code=202)
    def add_documents(request: Request, body: NewDocuments) -> dict[str, Any]:
        names = [document.name for document in body.documents]
        if len(set(names)) < len(names):
            raise HTTPException(400, "two documents of the build have one name")
        pairs = [(document.name, document.text) for document in body.documents]
        return documents.builds.start(documents.namespace(request), pairs).to_dict(documents.store)

    @routes.get("/builds/{build_id}")
    def show_build(request: Request, build_id: str) -> dict[str, Any]:
        build = documents.builds.get(build_id, documents.namespace(request))
        if build is None:
            raise HTTPException(404, f"there is no build {build_id[:64]}")
        return build.to_dict(documents.store)

    @routes.delete("/documents/{artifact_id}")
    def delete_document(request: Request, artifact_id: str) -> dict[str, Any]:
        row = documents.find(request, artifact_id)
        if row.namespace != documents.namespace(request):
            raise HTTPException(403, f"document {artifact_id[:12]} is shared; this key cannot delete it")
        try:
            return {"artifact_id": artifact_id, "bytes": documents.store.remove(artifact_id, row.namespace)}
        except StoreError as error:
            raise HTTPException(409, str(error)) from None

    return routes


def _rows(documents: Documents, rows: Iterable[ArtifactRow]) -> list[dict[str, Any]]:
    return [documents.to_dict(row) for row in rows]
