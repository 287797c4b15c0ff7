"""Media that mean harm, and odd ones that are read: files made here, and URLs."""

from __future__ import annotations

import base64
import gzip
import struct
import zlib
from typing import Any

from tests.media.checkpoints import file_of, picture

PNG = file_of(picture(seed=0))
JPEG = file_of(picture(seed=0), "JPEG")


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, rows: bytes = b"", *before: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG whose head says so, with these bytes as its rows, and chunks before them."""
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + b"".join(before) + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")
    )


def tiff(width: int, height: int, **tags: int) -> bytes:
    """A TIFF of one strip that is not there, and whose directory leads to itself if `loops`."""
    entries = [(256, width), (257, height), (258, 8), (259, tags.get("compression", 1)), (262, 1), (273, 8),
               (278, height), (279, width)]  # fmt: skip
    fields = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    end = struct.pack("<I", 8 if tags.get("loops") else 0)
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(entries)) + fields + end


def bmp(width: int, height: int, compression: int = 0) -> bytes:
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, compression, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + info


def webp(width: int, height: int) -> bytes:
    body = struct.pack("<I", 0) + struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    chunk = b"WEBPVP8X" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(chunk)) + chunk


def _jpeg_of_size(width: int, height: int) -> bytes:
    """A JPEG whose frame says that it is so large."""
    at = JPEG.index(b"\xff\xc0") + 5
    return JPEG[:at] + struct.pack(">HH", height, width) + JPEG[at + 4 :]


def _long_line() -> bytes:
    from PIL import Image

    return file_of(Image.new("RGB", (1, 60_000)))


def _floats() -> bytes:
    from PIL import Image

    return file_of(Image.new("F", (4, 4)), "TIFF")


FILES: dict[str, bytes] = {
    "10^9 pixels": png(40_000, 25_000),
    "10^18 pixels": png(2**31 - 1, 2**31 - 1),
    "more than 2^31 columns": png(2**32 - 1, 1),
    "a bomb of zeros": png(20_000, 20_000, zlib.compress(bytes(2**22)) * 4),
    "no pixels": png(0, 5),
    "no rows": png(5, 0),
    "rows that are no zlib": png(50, 50, b"no zlib at all"),
    "fewer rows than its head says": png(50, 50, zlib.compress(bytes(99))),
    "a depth that is none": png(5, 5, zlib.compress(bytes(99)), depth=7),
    "a kind of colour that is none": png(5, 5, zlib.compress(bytes(99)), colour=5),
    "a bomb in its text": png(5, 5, b"", _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**27)))),
    "a bomb in its profile": png(5, 5, b"", _chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(2**27)))),
    "a chunk of 2^31 bytes": PNG[:33] + struct.pack(">I", 2**31 - 1) + b"IDAT",
    "a wrong checksum": PNG[:29] + b"\0\0\0\0" + PNG[33:],
    "a head alone": PNG[:33],
    "a signature alone": PNG[:8],
    "an end before its pixels": png(5, 5)[:33] + _chunk(b"IEND", b""),
    "a line that becomes long": _long_line(),
    "cut short": PNG[: len(PNG) // 2],
    "a JPEG cut short": JPEG[:300],
    "a JPEG of 65,535 squared": _jpeg_of_size(65_535, 65_535),
    "a JPEG without height": _jpeg_of_size(60, 0),
    "a JPEG of markers": b"\xff\xd8" + b"\xff\xe0\x00\x02" * 2**16,
    "a JPEG of FFs": b"\xff\xd8" + b"\xff" * 2**16,
    "a GIF without a picture": b"GIF89a\x01\0\x01\0\0\0\0;",
    "a GIF of 65,535 squared": b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x02\x02L\x01\0;",
    "a GIF of extensions": b"GIF89a\x01\0\x01\0\0\0\0" + b"!\xfe\x01a\0" * 2**14,
    "a WEBP of nonsense": b"RIFF\x1a\0\0\0WEBPVP8 " + bytes(14),
    "a WEBP of 2^24 squared": webp(2**24, 2**24),
    "a WEBP of a head": b"RIFF\xff\xff\xff\xffWEBP",
    "a TIFF without strips": tiff(50, 50),
    "a TIFF too large": tiff(2**31, 2**31),
    "a TIFF that leads to itself": tiff(50, 50, loops=1),
    "a TIFF compressed by nobody": tiff(50, 50, compression=60_000),
    "a TIFF of floating point": _floats(),
    "a BMP of 10^9 pixels": bmp(40_000, 25_000),
    "a BMP of negative width": bmp(-50, 50),
    "a BMP without pixels": bmp(50, 50),
    "a BMP compressed by nobody": bmp(50, 50, 99),
    "text": b"Hello, how are you?",
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "HTML": b"<html><img src='http://169.254.169.254/'></html>",
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "PDF": b"%PDF-1.7\n",
    "PPM": b"P6 1 1 255\n\0\0\0",
    "XBM": b"#define a_width 9\n#define a_height 9\nstatic char a_bits[] = {0};",
    "ICO": b"\0\0\1\0\1\0\x10\x10\0\0\1\0\x20\0\x68\4\0\0\x16\0\0\0",
    "PSD": b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 30_000, 30_000, 8, 3),
    "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n",
    "HEIC": b"\0\0\0\x18ftypheic" + bytes(12),
    "AVIF": b"\0\0\0\x18ftypavif" + bytes(12),
    "TGA": bytes([0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 24, 0]),
    "a video": b"\0\0\0\x18ftypmp42" + bytes(12),
    "a zip": b"PK\3\4" + bytes(26),
    "a gzip of a PNG": gzip.compress(PNG),
    "a program": b"\x7fELF" + bytes(60),
    "pickled": b"\x80\x04\x95.",
    "zeros": bytes(2**20),
    "nothing": b"",
}
"""Files that no image is read from."""
URLS: dict[str, str] = {
    "no base64": "data:image/png;base64,&&&&",
    "base64 of one character": "data:image/png;base64,A",
    "padding alone": "data:image/png;base64,====",
    "no comma": "data:image/png;base64",
    "a scheme alone": "data:",
    "an escape that is none": "data:image/png,%zz",
    "empty": "",
    "a space before it": " http://127.0.0.1/a.png",
    "a line break": "http://127.0.0.1/\r\nHost: example.com",
    "a null byte in a host": "http://example.com\0.127.0.0.1/",
    "a host that is not allowed": "http://example.com/a.png",
    "metadata": "http://169.254.169.254/latest/meta-data",
    "metadata by name": "http://metadata.google.internal/",
    "metadata as IPv6": "http://[fd00:ec2::254]/",
    "metadata through a gateway": "http://[64:ff9b::a9fe:a9fe]/",
    "a name that leads to an address": "http://169.254.169.254.nip.io/",
    "itself": "http://127.0.0.2/a.png",
    "itself by name": "http://localhost/a.png",
    "itself with a dot": "http://localhost./a.png",
    "itself in capitals": "HTTP://LOCALHOST/a.png",
    "any address": "http://0.0.0.0/",
    "any address, short": "http://0/",
    "any address as IPv6": "http://[::]/",
    "as a number": "http://2130706434/a.png",
    "as hex": "http://0x7f.2/a.png",
    "as octal": "http://0177.0.0.2/a.png",
    "as three numbers": "http://127.0.2/a.png",
    "in wide digits": "http://１２７.0.0.2/a.png",
    "in escapes": "http://%31%32%37.0.0.2/a.png",
    "as IPv6": "http://[::1]/a.png",
    "mapped": "http://[::ffff:127.0.0.2]/a.png",
    "with a zone": "http://[fe80::1%25lo]/a.png",
    "a user": "http://example.com@127.0.0.2/a.png",
    "a backslash": "http://example.com\\@127.0.0.2/a.png",
    "a fragment": "http://127.0.0.2#@example.com/a.png",
    "no host": "http:///a.png",
    "a port that is none": "http://example.com:99999/a.png",
    "9,000 characters": "http://example.com/" + "a" * 9_000,
    "another scheme": "ftp://example.com/a.png",
    "gopher": "gopher://127.0.0.1:70/",
    "dict": "dict://127.0.0.1:11211/stat",
    "a script": "javascript:alert(1)",
    "a blob": "blob:http://127.0.0.1/1",
    "no scheme": "//example.com/a.png",
    "a relative path": "a.png",
    "any file": "file:///etc/passwd",
    "any file, by host": "file://localhost/etc/passwd",
    "any file, without slashes": "file:etc/passwd",
    "a device": "file:///dev/zero",
    "its environment": "file:///proc/self/environ",
    "its input": "file:///dev/stdin",
    "a file of a host": "file://example.com/a.png",
    "a null byte": "file:///etc/passwd%00.png",
    "a link that leads out": "file://{media}/link.png",
    "a path that leads out": "file://{media}/../secret.png",
    "an encoded path that leads out": "file://{media}/%2e%2e/secret.png",
    "an encoded slash that leads out": "file://{media}/..%2fsecret.png",
    "a path encoded twice": "file://{media}/%252e%252e/secret.png",
    "a name that begins alike": "file://{media}-other/a.png",
    "a directory": "file://{media}",
    "a missing file": "file://{media}/b.png",
}
"""URLs that nothing is read from; `{media}` is the directory of --allowed-local-media-path, and 127.0.0.1 alone may be
one of --allowed-media-domains."""
HARMFUL = {name: data_url(content) for name, content in FILES.items()} | URLS


def _odd() -> dict[str, bytes]:
    from PIL import Image

    image, exif = picture(seed=0), Image.Exif()
    exif[0x0112] = 6
    frames = [picture(seed=seed) for seed in range(3)]
    palette = image.quantize(16)
    grey = image.convert("L")
    cases: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "turned by EXIF": (image, "JPEG", {"exif": exif}),
        "broken EXIF": (image, "JPEG", {"exif": b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\xff" * 40}),
        "an animated GIF": (frames[0].quantize(16), "GIF", {"save_all": True, "append_images": frames[1:]}),
        "an animated WEBP": (frames[0], "WEBP", {"save_all": True, "append_images": frames[1:]}),
        "an animated PNG": (frames[0], "PNG", {"save_all": True, "append_images": frames[1:]}),
        "a TIFF of pages": (frames[0], "TIFF", {"save_all": True, "append_images": frames[1:]}),
        "CMYK": (image.convert("CMYK"), "JPEG", {}),
        "a palette": (palette, "PNG", {}),
        "a palette with transparency": (palette, "PNG", {"transparency": 3}),
        "grey of 16 bits": (grey.convert("I").point(lambda value: value * 257).convert("I;16"), "PNG", {}),
        "one bit": (grey.convert("1"), "PNG", {}),
        "grey with transparency": (image.convert("LA"), "PNG", {}),
        "progressive": (image, "JPEG", {"progressive": True}),
        "one pixel": (image.resize((1, 1)), "PNG", {}),
    }
    return {name: file_of(each, kind, **options) for name, (each, kind, options) in cases.items()}


ODD = _odd()
"""Files that an image is read from."""


def large(side: int = 6_000) -> bytes:
    """A small file of an image that takes much memory while it is read."""
    row = zlib.compress(b"\0" * (3 * side + 1) * side, 9)
    return png(side, side, row)
