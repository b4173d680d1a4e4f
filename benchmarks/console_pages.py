"""Open consoles: asks a gateway what the console's first screen asks, as often, for a number of pages, until killed.

`console_pages.py HOST PORT PAGES`. The standard library alone, so that asking costs the machine little.
"""

from __future__ import annotations

import asyncio
import random
import sys

EVERY_3_S = ("/v1/admin/overview", "/v1/admin/requests?tenant=*&limit=20")
EVERY_9_S = ("/v1/stats", "/v1/admin/history?range_s=3600&step_s=60")


async def ask(host: str, port: int) -> None:
    """One page, on one connection."""
    await asyncio.sleep(random.uniform(0, 3))
    reader, writer = await asyncio.open_connection(host, port)
    etags: dict[str, str] = {}
    for turn in range(1_000_000):
        for path in (*EVERY_3_S, *(EVERY_9_S if turn % 3 == 0 else ())):
            known = f"if-none-match: {etags[path]}\r\n" if path in etags else ""
            writer.write(
                f"GET {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncache-control: max-age=2\r\n{known}\r\n".encode()
            )
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            status, headers = head[9:12], dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
            if status not in ("200", "304"):
                raise SystemExit(f"{path} answers {status}")
            await reader.readexactly(int(headers.get("content-length", "0")))
            if "etag" in headers:
                etags[path] = headers["etag"]
        await asyncio.sleep(3)


async def main(host: str, port: str, pages: str) -> None:
    await asyncio.gather(*(ask(host, int(port)) for _ in range(int(pages))))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
