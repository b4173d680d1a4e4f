"""The health check of the image: the process in this container says that it is ready.

Its port is one of those in penstock.toml: gateway, worker, bridge, webhooks, summarizer.
"""

import sys
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

for port in (8000, 8001, 8002, 8003, 8004):
    try:
        urlopen(f"http://127.0.0.1:{port}/readyz", timeout=4).close()
    except HTTPError as error:
        sys.exit(f"port {port}: {error}")
    except URLError:  # another process of Penstock has this port
        continue
    sys.exit(0)
sys.exit("no port answers")
