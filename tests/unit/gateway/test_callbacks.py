"""Which callbacks are accepted, told from the settings and the URL alone."""

from __future__ import annotations

import base64

import pytest
from pydantic import ValidationError

from penstock.gateway.callbacks import Callbacks, WebhooksSection
from penstock.schemas.errors import InvalidRequest, UnsupportedParameter

KEY = "whsec_" + base64.b64encode(bytes(32)).decode()
OTHER = "whsec_" + base64.b64encode(bytes(range(24))).decode()


@pytest.mark.parametrize(
    "secret", ["whsec_", "whsec_…", "whsec_AAAA", KEY.removeprefix("whsec_"), [], [KEY, "x"], KEY + "A" * 90]
)
def test_a_secret_that_signs_badly_is_refused_and_not_shown(secret: object) -> None:
    with pytest.raises(ValidationError) as caught:
        WebhooksSection.model_validate({"secret": secret})
    assert "whsec_ and the base64" in str(caught.value.errors()[0]["msg"])


def test_a_tenant_has_its_own_secrets_or_the_common_one() -> None:
    callbacks = Callbacks(WebhooksSection.model_validate({"secret": KEY, "secrets": {"acme": [OTHER, KEY]}}))
    assert callbacks.secrets("acme") == [OTHER, KEY]
    assert callbacks.secrets("other") == [KEY]
    with pytest.raises(UnsupportedParameter, match=r"webhooks\.secret"):
        Callbacks(WebhooksSection.model_validate({"secrets": {"acme": OTHER}})).check("other", "https://x.example/")
    assert WebhooksSection.model_validate({"secret": ""}).secret is None


ALLOWED = [
    "https://hooks.example.com/a?b=c",
    "http://8.8.8.8/",
    "http://10.0.0.7:8080/hook",
    "http://hooks.internal/",
]
REFUSED = [
    "https://hooks.example.com:8443/",
    "http://10.0.0.7/",
    "http://10.0.0.8:8080/",
    "http://127.0.0.1/",
    "http://localhost/",
    "http://a.localhost/",
    "http://[::1]/",
    "http://[::ffff:10.0.0.8]/",
    "http://169.254.169.254/latest/meta-data",
    "http://2.hooks.internal:81/",
]


@pytest.mark.parametrize("url", [*ALLOWED, *REFUSED])
def test_hosts(url: str) -> None:
    section = {"secret": KEY, "internal_hosts": ["10.0.0.7:8080", "hooks.internal"]}
    callbacks = Callbacks(WebhooksSection.model_validate(section))
    if url in ALLOWED:
        callbacks.check("default", url)
    else:
        with pytest.raises(InvalidRequest, match=r"webhooks\.internal_hosts"):
            callbacks.check("default", url)
