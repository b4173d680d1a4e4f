"""The bodies and answers of the routes of files and batches as models, for OpenAPI."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.gateway.routes.answers import Answer, Json


class ExpiresAfter(BaseModel):
    """How long a file is kept."""

    model_config = ConfigDict(extra="forbid", strict=True)

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3_600, le=2_592_000)


class NewBatch(BaseModel):
    """The body of POST /v1/batches."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=16
    )
    output_expires_after: ExpiresAfter | None = None


class FileObject(Answer):
    """OpenAI's file object."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileDeleted(Answer):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchError(Answer):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(Answer):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(Answer):
    total: int
    completed: int
    failed: int


class WaitsFor(Answer):
    """What the lines in flight wait for, if none has ended for a while."""

    reason: str
    detail: str | None


class BatchWork(Answer):
    in_flight: int
    waiting_for: WaitsFor | None


class BatchObject(Answer):
    """OpenAI's batch object."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: Json
    metadata: dict[str, str] | None
    penstock: BatchWork
