"""A server of Google Cloud Storage's XML API for tests: moto's S3 server, whose requests that API shares.

The client for GCS speaks the XML API. No emulator of GCS that a package brings serves it: fake-gcs-server 1.56 has no
plain PUT and no multipart uploads, gcp-storage-emulator and gcplocal have the JSON API alone, and the fork of
fake-gcs-server that the client's own authors use is no package and has no multipart uploads.

moto takes any token and any signature, and knows no generations of objects: what only GCS does is not tested here.
"""

from __future__ import annotations

import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from s3_server import Bucket, S3Server


class GcsServer:
    """The S3 server by its other name, and the key of a service account in a file of the folder."""

    def __init__(self, server: S3Server, folder: Path) -> None:
        self._server = server
        self._key_file = folder / "service-account.json"
        self._key_file.write_text(json.dumps(_service_account(server.url)))

    def bucket(self) -> Bucket:
        location = self._server.bucket().location.replace("s3://", "gs://", 1)
        return Bucket(location, {"google_service_account": str(self._key_file), "allow_http": "true"})


def _service_account(url: str) -> dict[str, str]:
    """As Google's console gives it out, with the server's URL. With a key the client makes tokens by itself."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return {
        "type": "service_account",
        "client_email": "tests@penstock.iam.gserviceaccount.com",
        "private_key_id": "1",
        "private_key": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
        "gcs_base_url": url,
    }
