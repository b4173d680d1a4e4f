"""The health check of the image: the process in this container says that it is ready.

Each part has a port; the one that answers here is this container's.
"""

import os
import sys
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

PORTS = {
    "GATEWAY__PORT": "8000",
    "WORKER__HEALTH_PORT": "8001",
    "BRIDGE__HEALTH_PORT": "8002",
    "WEBHOOKS__HEALTH_PORT": "8003",
    "SUMMARIZER__HEALTH_PORT": "8004",
}
"""Those of deploy/penstock.toml; variables go before."""

direct = build_opener(ProxyHandler({}))  # whatever proxy the variables name
for name, port in PORTS.items():
    port = os.environ.get(f"PENSTOCK_{name}", port)
    try:
        direct.open(f"http://127.0.0.1:{port}/readyz", timeout=4).close()
    except HTTPError as error:
        sys.exit(f"port {port}: {error}")
    except OSError:  # the port of another part
        continue
    sys.exit(0)
sys.exit("no port answers")
