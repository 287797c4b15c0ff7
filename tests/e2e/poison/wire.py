"""What is wrong before there is a request: heads, hosts, paths, methods, framing, connections that end or never do."""

from __future__ import annotations

from tests.e2e.poison.poison import COMPLETIONS, JSON, Poison, post, wire

BODY = b'{"prompt": "a", "max_tokens": 2}'
HOST = b"Host: 127.0.0.1\r\n"
TYPE = b"Content-Type: application/json\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\n" + HOST + TYPE + b"Transfer-Encoding: chunked\r\n\r\n"
REFUSED = (0, 400)


def sized(length: bytes, body: bytes = BODY, more: bytes = b"") -> bytes:
    """A completion that announces a length."""
    head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + TYPE + more + b"Content-Length: " + length + b"\r\n\r\n"
    return head + body


def get(target: str, allowed: int | tuple[int, ...], method: str = "GET") -> Poison:
    """A target, as it stands."""
    line = f"{method} {target} HTTP/1.1\r\n".encode() + HOST + b"Connection: close\r\n\r\n"
    return wire(f"{method} {target[:60]}", allowed, line)


def headers(name: str, allowed: int, **more: str) -> Poison:
    """A completion with headers of its own."""
    named = {key.replace("_", "-"): value for key, value in more.items()}
    return post(name, allowed, COMPLETIONS, lambda: {"prompt": "a", "max_tokens": 2}, headers=JSON | named)


STREAM = b'{"prompt": "a", "stream": true, "n": 9, "max_tokens": 99}'
GRAMMAR = b'{"prompt": "a", "guided_json": {"type": "integer", "multipleOf": 9973}}'
LENGTH = str(len(BODY)).encode()
WIRE: list[Poison] = [
    # --- heads
    wire("no HTTP", REFUSED, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500),
    wire("a line of nothing", REFUSED, b"\r\n" * 200 + b"x\r\n\r\n"),
    wire("binary", REFUSED, bytes(range(256)) * 40),
    wire("HTTP of another age", REFUSED, b"GET / HTTP/9.9\r\n\r\n"),
    wire("the preface of HTTP/2", REFUSED, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    wire("a header without a colon", REFUSED, b"GET /health HTTP/1.1\r\nnothing\r\n\r\n"),
    wire("a header with a line break", REFUSED, b"GET /health HTTP/1.1\r\nA: b\rc: d\r\n\r\n"),
    wire("a header with zeros", REFUSED, b"GET /health HTTP/1.1\r\n" + HOST + b"A: \x00\r\nConnection: close\r\n\r\n"),
    wire("a header of 100 KB", 431, b"GET /health HTTP/1.1\r\n" + HOST + b"A: " + b"x" * 100_000 + b"\r\n\r\n"),
    wire("20,000 headers", 431, b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n"),
    wire("a target of 100 KB", (414, 431), b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n"),
    wire("20 MB of head", (0, 431), *[b"GET /health HTTP/1.1\r\nA: " + b"x" * 2**20, *[b"y" * 2**20] * 19]),
    headers("another content type", 415, Content_Type="text/plain"),
    headers("a multipart body", 415, Content_Type="multipart/form-data; boundary=" + "b" * 1_000),
    headers("a key that nobody asked for", 200, Authorization="Bearer " + "k" * 10_000),
    headers("a request id of 10 KB", 200, X_Request_Id="i" * 10_000),
    headers("a request id with markup", 200, X_Request_Id="<script>alert(1)</script>"),
    headers("a host of somebody else", 200, Host="evil.example:1@127.0.0.1/x?y#z"),
    headers("a forwarded host", 200, X_Forwarded_Host="evil.example", X_Forwarded_For=", ".join(["1.1.1.1"] * 500)),
    headers("a priority that is none", 200, Priority="u=99, i"),
    headers("a coding that is not spoken", 415, Content_Encoding="gzip"),
    headers("a range", 200, Range="bytes=0-99999999999999999999"),
    headers("an expectation that is none", 200, Expect="200-maybe"),
    # --- targets and methods
    get("/../../etc/passwd", 404),
    get("//etc/passwd", 404),
    get("/%2e%2e/%2e%2e/etc/passwd", 404),
    get("/docs/files/..%2f..%2fapp.py", 404),
    get("/docs/files/%00", 404),
    get("/v1/files/..%2f..%2fetc%2fpasswd", (400, 404)),
    get("/v1/files/%00/content", (400, 404)),
    get("/v1/responses/..%2f..%2fx", (400, 404)),
    get("/v1/batches/" + "b" * 5_000, (400, 404)),
    get("/v1/batches?limit=99999999999999999999", (200, 400)),
    get("/v1/files?limit=-1&after=%ff", (200, 400)),
    get("/v1/models/" + "m" * 5_000, 404),
    get("/v1/models/%ff%fe", (400, 404)),
    get("http://evil.example/v1/models", (200, 400, 404)),
    get("/v1/models?" + "a=b&" * 5_000, 200),
    get("/v1/models#fragment", (200, 400, 404)),
    get("*", (400, 404, 405), method="OPTIONS"),
    get("127.0.0.1:22", (0, 400, 404, 405), method="CONNECT"),
    get("/v1/completions", 405, method="PUT"),
    get("/v1/completions", 405, method="TRACE"),
    get("/v1/completions", (400, 405), method="PROPFIND"),
    get("/v1/completions", REFUSED, method="NONSENSE"),
    get("/v1/chat/completions", 405, method="DELETE"),
    get("/health", 405, method="DELETE"),
    get("/v1/completions", 405),
    # --- framing
    wire("a negative length", REFUSED, sized(b"-5")),
    wire("a length beyond 64 bits", REFUSED, sized(b"9" * 40)),
    wire("a length that is text", REFUSED, sized(b"ten")),
    wire("two lengths", REFUSED, sized(LENGTH, more=b"Content-Length: 5\r\n")),
    wire("a length and chunks", (0, 200, 400), sized(LENGTH, more=b"Transfer-Encoding: chunked\r\n")),
    wire("a length of a terabyte", 413, sized(b"1099511627776", b"{")),
    wire("less than announced", 0, sized(b"5000"), hang_up=True),
    wire("a chunk of 2^70 bytes", REFUSED, CHUNKED + b"400000000000000000\r\n{"),
    wire("a chunk of no number", REFUSED, CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n"),
    wire("a negative chunk", REFUSED, CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n"),
    wire("a chunk without its end", REFUSED, CHUNKED + b"2\r\n{}xx0\r\n\r\n"),
    wire("chunks beyond the limit", 413, CHUNKED, *[b"100000\r\n" + b" " * 2**20 + b"\r\n"] * 17),
    wire("3,000 chunks of a byte", 400, CHUNKED, b"1\r\n \r\n" * 3_000 + b"0\r\n\r\n"),
    wire("trailers without end", (0, 431), CHUNKED + b"2\r\n{}\r\n0\r\n", *[b"A: " + b"x" * 2**16 + b"\r\n"] * 40),
    wire("a trailer without end", (0, 431), CHUNKED + b"2\r\n{}\r\n0\r\nA: ", *[b"x" * 2**16] * 40),
    wire("a smuggled request", (0, 200, 400),
         sized(LENGTH, BODY + b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n", b"Transfer-Encoding : chunked\r\n")),
    wire("100 requests in one write", 200, b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n", *[
        b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"] * 99),
    wire("a request behind a broken one", REFUSED, b"BROKEN\r\n\r\n" + sized(LENGTH)),
    wire("an upgrade to a websocket", (200, 400, 404, 405, 426),
         b"GET /v1/completions HTTP/1.1\r\n" + HOST + b"Upgrade: websocket\r\nConnection: Upgrade\r\n"
         b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"),
    wire("an upgrade to h2c", (200, 400, 404, 405),
         b"GET /health HTTP/1.1\r\n" + HOST + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n"
         b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n\r\n"),
    # --- connections
    wire("silence", 0, b"", hang_up=True),
    wire("half a line", 0, b"POST /v1/comp", hang_up=True),
    wire("a byte at a time", 200, *[bytes([byte]) for byte in sized(LENGTH)], pause_s=0.002),
    wire("a body that comes late", 200, sized(LENGTH, b""), BODY, pause_s=0.5),
    wire("a client that leaves before the answer", 0, sized(LENGTH), hang_up=True),
    wire("a client that leaves a stream", 0, sized(str(len(STREAM)).encode(), STREAM), hang_up=True),
    wire("a client that leaves before its grammar", 0, sized(str(len(GRAMMAR)).encode(), GRAMMAR), hang_up=True),
]  # fmt: skip
