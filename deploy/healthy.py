"""The health check of the image: the process in this container says that it is ready.

Each part has a port; the one that answers here is this container's.
"""

import os
import sys
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

PORTS = {
    "GATEWAY__PORT": "8000",
    "WORKER__HEALTH_PORT": "8001",
    "BRIDGE__HEALTH_PORT": "8002",
    "WEBHOOKS__HEALTH_PORT": "8003",
    "SUMMARIZER__HEALTH_PORT": "8004",
}
"""Those of deploy/penstock.toml; variables go before."""

for name, port in PORTS.items():
    port = os.environ.get(f"PENSTOCK_{name}", port)
    try:
        urlopen(f"http://127.0.0.1:{port}/readyz", timeout=4).close()
    except HTTPError as error:
        sys.exit(f"port {port}: {error}")
    except URLError:  # the port of another part
        continue
    sys.exit(0)
sys.exit("no port answers")
