"""Batches for tests of what keeps and runs them."""

from __future__ import annotations

import uuid
from typing import Any

from penstock.common.clock import now_ms
from penstock.gateway.batches.records import Batch


def new_batch(tenant: str = "default", **fields: Any) -> Batch:
    """A batch that was made now, without lines, and expires in a minute."""
    created_ms = fields.setdefault("created_ms", now_ms())
    known: dict[str, Any] = {"batch_id": str(uuid.uuid4()), "input_file_id": str(uuid.uuid4()), "key_id": None}
    known |= {"endpoint": "/v1/embeddings", "expires_at": created_ms // 1000 + 60}
    return Batch(tenant=tenant, **{**known, **fields})
