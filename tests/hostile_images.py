"""Images and URLs that mean harm, from a seed: bytes for guarded decoding, and a server with a DNS for fetching."""

from __future__ import annotations

import asyncio
import io
import ipaddress
import random
import struct
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpcore
from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MARK = b"<script>alert(document.cookie)</script>"

# --- images


def picture(rng: random.Random, format_name: str = "PNG", size: tuple[int, int] | None = None) -> bytes:
    """A good image of noise, so that it does not compress to nothing."""
    width, height = size or (rng.randint(16, 96), rng.randint(16, 96))
    image = Image.frombytes("RGB", (width, height), rng.randbytes(width * height * 3))
    stream = io.BytesIO()
    image.save(stream, format_name)
    return stream.getvalue()


def chunk(name: bytes, body: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack("!I", len(body)) + name + body + struct.pack("!I", zlib.crc32(name + body))


def png(width: int, height: int, *between: bytes, body: bytes | None = None) -> bytes:
    """A PNG that says it has this size; its body may be of another."""
    header = struct.pack("!IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes((width * 3 + 1) * height)) if body is None else body
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (chunk(b"IHDR", header), *between, chunk(b"IDAT", body), chunk(b"IEND", b""))
    )


def bomb(rng: random.Random) -> bytes:
    """Few bytes that say they are very many pixels."""
    side = rng.choice([20_000, 65_000, 100_000, 2**31 - 1])
    kind = rng.randrange(6)
    if kind == 0:
        return png(side, rng.choice([1, side]), body=zlib.compress(bytes(1000)))
    if kind == 1:
        data = bytearray(picture(rng, "JPEG"))
        at = data.index(b"\xff\xc0")
        data[at + 5 : at + 9] = struct.pack("!HH", 65_000, 65_000)
        return bytes(data)
    if kind == 2:
        return (
            b"GIF89a"
            + struct.pack("<HHBBB", 65_535, 65_535, 0x80, 0, 0)
            + bytes(6)
            + b"\x2c"
            + struct.pack("<HHHHB", 0, 0, 65_535, 65_535, 0)
            + b"\x02\x02\x44\x01\x00\x3b"
        )
    if kind == 3:
        header = struct.pack("<IiiHHIIiiII", 40, side, rng.choice([1, 60_000]), 1, 24, 0, 0, 0, 0, 0, 0)
        return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + header
    if kind == 4:
        vp8x = b"VP8X" + struct.pack("<I", 10) + bytes([0x02, 0, 0, 0]) + b"\xff\xff\xff"[:3] + b"\xff\xff\xff"
        body = b"WEBP" + vp8x + b"ANIM" + struct.pack("<I", 6) + bytes(6)
        return b"RIFF" + struct.pack("<I", len(body)) + body
    text = b"Comment\x00\x00" + zlib.compress(bytes(80 * 1024 * 1024), 9) if rng.random() < 0.2 else _SMALL_TEXT_BOMB
    return png(8, 8, chunk(b"zTXt", text))


_SMALL_TEXT_BOMB = b"Comment\x00\x00" + zlib.compress(bytes(8 * 1024 * 1024), 9)


def truncated(rng: random.Random) -> bytes:
    data = picture(rng, rng.choice(FORMATS))
    return data[: rng.randint(13, max(14, len(data) * 9 // 10))]


def wrong_type(rng: random.Random) -> bytes:
    """Not an image, or of a format that is not accepted, whatever it calls itself."""
    stream = io.BytesIO()
    kind = rng.randrange(10)
    if kind < 4:
        Image.new("RGB", (16, 16)).save(stream, ("TIFF", "PPM", "ICO", "JPEG2000")[kind])
        return stream.getvalue()
    beginnings = [
        b"<svg xmlns='http://www.w3.org/2000/svg'><image href='http://169.254.169.254/'/></svg>",
        b"<!doctype html>" + MARK,
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file",
        b"%PDF-1.7\n",
        b"PK\x03\x04",
        b"\x7fELF",
    ]
    return beginnings[kind - 4] + rng.randbytes(rng.randint(0, 400))


def polyglot(rng: random.Random) -> bytes:
    """The beginning of one thing and the body of another."""
    kind = rng.randrange(6)
    other = picture(rng, rng.choice(FORMATS))
    if kind == 0:
        return b"\x89PNG\r\n\x1a\n" + other
    if kind == 1:
        return b"\xff\xd8\xff\xe0" + MARK + other[16:]
    if kind == 2:
        return b"GIF89a=1;/*" + MARK + b"*/"
    if kind == 3:
        return b"BM" + MARK + other
    if kind == 4:
        return b"RIFF" + struct.pack("<I", len(other)) + b"WEBP" + other
    return MARK + other


def broken(rng: random.Random) -> bytes:
    """A PNG whose header's checksum is wrong, or an image of random bytes behind its magic."""
    if rng.random() < 0.5:
        data = bytearray(picture(rng))
        data[rng.randint(16, 28)] ^= 1 << rng.randrange(8)
        return bytes(data)
    magic = rng.choice([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF\0\0\0\0WEBP", b"BM"])
    return magic + rng.randbytes(rng.randint(0, 2000))


IMAGES: dict[str, Callable[[random.Random], bytes]] = {
    "bomb": bomb,
    "truncated": truncated,
    "wrong type": wrong_type,
    "polyglot": polyglot,
    "broken": broken,
    "empty": lambda rng: b"",
}


def hostile_images(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """(kind, bytes), none of which is an image that anybody should get."""
    rng = random.Random(seed)
    kinds = [kind for kind in IMAGES if kind != "empty"]
    for number in range(count):
        kind = "empty" if number % 97 == 0 else rng.choice(kinds)
        yield kind, IMAGES[kind](rng)


def scan_bomb(side: int = 1500, scans: int = 3000) -> bytes:
    """A progressive JPEG with the same scan again and again: each one takes a pass over all coefficients."""
    stream = io.BytesIO()
    Image.new("L", (side, side)).save(stream, "JPEG", progressive=True)
    data = stream.getvalue()
    starts = [at for at in range(len(data) - 1) if data[at : at + 2] == b"\xff\xda"]
    last = data[starts[-1] : data.rindex(b"\xff\xd9")]
    return data[: starts[-1]] + last * scans + b"\xff\xd9"


# --- URLs

PUBLIC = "93.184.216.34"
FORBIDDEN = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16",
        "192.0.0.0/24", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4", "168.63.129.16/32", "::/96", "::1/128",
        "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "fc00::/7", "fe80::/10",
        "ff00::/8",
    )
)  # fmt: skip
"""PublishedPrefix again here, by hand: what must never be connected to."""

BAD_ADDRESSES = (
    "169.254.169.254", "127.0.0.1", "127.8.8.8", "10.1.2.3", "172.16.5.4", "172.31.255.1", "192.168.1.1", "100.64.0.1",
    "100.100.100.200", "192.0.0.192", "168.63.129.16", "0.0.0.0", "224.0.0.1", "239.1.1.1", "255.255.255.255",
    "240.0.0.1", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fd00:ec2::254", "fd12:3456::1", "ff02::1",
    "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a9fe:a9fe", "2002:7f00:1::1",
    "::127.0.0.1", "::ffff:0:10.0.0.1", "2001:0:1:2::3", "fec0::1",
)  # fmt: skip


class Dns:
    """Names of the tests: `evil-n` has a bad address, `mixed-n` a good and a bad one, `turning-n` both in turn."""

    def __init__(self) -> None:
        self._asked: dict[str, int] = {}

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self._asked[host] = self._asked.get(host, 0) + 1
        name = host.partition(".")[0]
        if name.startswith("evil-"):
            return [BAD_ADDRESSES[int(name[5:]) % len(BAD_ADDRESSES)]]
        if name.startswith("mixed-"):
            bad = BAD_ADDRESSES[int(name[6:]) % len(BAD_ADDRESSES)]
            return [PUBLIC, bad] if int(name[6:]) % 2 else [bad, PUBLIC]
        if name.startswith("turning-"):
            return [PUBLIC if self._asked[host] % 2 else BAD_ADDRESSES[int(name[8:]) % len(BAD_ADDRESSES)]]
        if name == "nowhere":
            raise OSError("no such name")
        try:  # the forms that the C library reads as addresses, as a resolver does
            return [str(ipaddress.ip_address(host))]
        except ValueError:
            pass
        odd = {
            "0x7f.1": "127.0.0.1",
            "2130706433": "127.0.0.1",
            "127.1": "127.0.0.1",
            "0251.0376.0251.0376": BAD_ADDRESSES[0],
        }
        return [odd.get(host, PUBLIC)]


class Network(httpcore.AsyncNetworkBackend):
    """Leads every connection to the tests' server, and remembers for which address it was."""

    def __init__(self, port: int) -> None:
        self.addresses: list[str] = []
        self._port = port
        self._real: Any = httpcore.AnyIOBackend()

    async def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):  # type: ignore[no-untyped-def]
        self.addresses.append(host)
        if port not in (80, 8080):
            raise httpcore.ConnectError("nobody listens")
        return await self._real.connect_tcp("127.0.0.1", self._port, timeout)

    def forbidden(self) -> list[str]:
        """The addresses connected to that must never be."""
        found = [ipaddress.ip_address(text) for text in self.addresses]
        return [str(one) for one in found if any(one.version == net.version and one in net for net in FORBIDDEN)]


def url_kinds(rng: random.Random) -> dict[str, str]:
    """One URL of each kind. The server's paths say what it does."""
    number, n = rng.randrange(10_000), rng.randrange(len(BAD_ADDRESSES))
    bad = BAD_ADDRESSES[n].partition("%")[0]
    literal = f"[{bad}]" if ":" in bad else bad
    return {
        "address": f"http://{literal}/latest/meta-data/",
        "odd address": f"http://{rng.choice(['0x7f.1', '2130706433', '127.1', '0251.0376.0251.0376'])}/",
        "name of a bad address": f"http://evil-{number}.example.com/a.png",
        "good and bad addresses": f"http://mixed-{number}.example.com/a.png",
        "redirect to an address": f"http://good.example.com/to/{literal}",
        "redirect to a bad name": f"http://good.example.com/to/evil-{number}.example.com",
        "DNS turns": f"http://turning-{number}.example.com/to/turning-{number}.example.com",
        "redirect loop": "http://good.example.com/loop",
        "redirect to a file": "http://good.example.com/file",
        "redirect to credentials": "http://good.example.com/to/user:secret@good.example.com",
        "scheme": rng.choice(
            ["file:///etc/passwd", "ftp://good.example.com/a", "gopher://x/", "data:image/png;base64,AA"]
        ),
        "credentials": "http://user:secret@good.example.com/a.png",
        "port": f"http://good.example.com:{rng.choice([22, 25, 6379, 9092])}/",
        "no URL": rng.choice(
            [
                "",
                "http://",
                "http://[::1",
                "//x",
                "http://a b/",
                "http://\udcff/",
                "x" * 3000,
                "http://good.example.com:99999/",
            ]
        ),
        "slash trick": rng.choice(
            [
                "http://good.example.com@169.254.169.254/",
                "http://169.254.169.254#@good.example.com/",
                "http:\\\\127.0.0.1\\",
            ]
        ),
        "unknown name": "http://nowhere.example.com/",
        "endless": "http://good.example.com/endless",
        "too large": "http://good.example.com/large",
        "encoded": "http://good.example.com/gzip",
        "not HTTP": "http://good.example.com/garbage",
        "broken off": "http://good.example.com/short",
        "status": f"http://good.example.com/status/{rng.choice([201, 204, 304, 401, 403, 404, 418, 500, 503])}",
        "endless head": "http://good.example.com/head",
        "not an image": "http://good.example.com/html",
        "drip": "http://slow.example.com/drip",
        "silent": "http://slow.example.com/silent",
    }


def hostile_urls(seed: int, count: int, slow_share: float = 0.02) -> Iterator[tuple[str, str]]:
    """(kind, URL), none of which gives an image. Slow ones are few: each takes the whole time that a URL has."""
    rng = random.Random(seed)
    for _ in range(count):
        urls = url_kinds(rng)
        slow = ("drip", "silent")
        kind = rng.choice(slow if rng.random() < slow_share else [kind for kind in urls if kind not in slow])
        yield kind, urls[kind]


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split(b" ")[1].decode()
        await _misbehave(path, writer, head.partition(b"Host: ")[2].partition(b"\r")[0])
        await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def _misbehave(path: str, writer: asyncio.StreamWriter, host: bytes) -> None:
    def redirect(location: str) -> None:
        writer.write(f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode())

    def head(*lines: str, status: int = 200) -> None:
        writer.write("\r\n".join([f"HTTP/1.1 {status} X", *lines, "", ""]).encode())

    if path.startswith("/to/"):
        redirect(f"http://{path[4:]}/next.png")
    elif path == "/loop":
        redirect("/loop")
    elif path == "/file":
        redirect("file:///etc/passwd")
    elif path == "/endless":
        head("Content-Type: image/png")
        while True:
            writer.write(bytes(65536))
            await writer.drain()
    elif path == "/large":
        head("Content-Length: 99999999999")
    elif path == "/gzip":
        head("Content-Encoding: gzip", "Content-Length: 2")
        writer.write(b"xx")
    elif path == "/garbage":
        writer.write(b"\x00\xff SSH-2.0-OpenSSH\r\n\r\n")
    elif path == "/short":
        head("Content-Length: 5000")
        writer.write(b"\x89PNG\r\n\x1a\n")
    elif path.startswith("/status/"):
        head("Content-Length: 0", status=int(path[8:]))
    elif path == "/head":
        writer.write(b"HTTP/1.1 200 OK\r\n" + b"X-Long: " + b"a" * 400_000)
    elif path == "/drip":
        head("Content-Length: 5000")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)
    elif path == "/silent":
        await asyncio.sleep(3600)
    elif path == "/host":
        head(f"Content-Length: {len(host)}")
        writer.write(host)
    elif path.startswith("/good"):
        data = picture(random.Random(1))
        head(f"Content-Length: {len(data)}")
        writer.write(data)
    else:  # /html, and what a redirect must not lead to
        head("Content-Type: image/png", f"Content-Length: {len(MARK)}")
        writer.write(MARK)


@asynccontextmanager
async def hostile_server() -> AsyncGenerator[int]:
    """Its port on this machine."""
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_answer(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
