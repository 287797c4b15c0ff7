"""Which hosts images are fetched from, and which of their addresses are connected to.

A name is resolved once, and the connection goes to an address that was checked: a name server that answers otherwise
the next time gains nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable

from quire.errors import RequestError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses that gateways translate to IPv4 (RFC 6052)."""
_NO_HOSTS = (
    "This server fetches no images: send the image itself, as a data: URL, or start the server with "
    "--allowed-media-domains."
)


class AllowedHosts:
    """The hosts of --allowed-media-domains.

    Args:
        entries: Host names, and IP addresses or networks such as 10.0.0.0/8. A name may lead to public addresses, and
            to those of the networks; an address in a URL has to be in one of the networks.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._names: set[str] = set()
        self._networks: list[Network] = []
        for entry in entries:
            try:
                self._networks.append(ipaddress.ip_network(entry.strip("[]"), strict=False))
            except ValueError:
                self._names.add(entry.lower().rstrip("."))

    def check(self, host: str) -> None:
        """Raise a RequestError unless images may be fetched from this host, a name or an address."""
        if not self._names and not self._networks:
            raise RequestError(_NO_HOSTS)
        address = _address(host)
        allowed = host in self._names if address is None else self._has(address)
        if not allowed:
            raise RequestError(
                f"Images are not fetched from {host[:253]!r}: it is not one of the server's --allowed-media-domains."
            )

    async def address_of(self, host: str, port: int) -> str:
        """Return the address to connect to for an allowed host. Raises RequestError if the host is not known, or one of
        its addresses is not public."""
        literal = _address(host)
        if literal is not None:
            return str(literal)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise RequestError(f"The image's host {host[:253]!r} is not known.") from None
        addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        for address in addresses:
            if not _is_public(address) and not self._has(address):
                raise RequestError(f"The image's host {host[:253]!r} has an address that is not public.")
        if not addresses:
            raise RequestError(f"The image's host {host[:253]!r} is not known.")
        return str(addresses[0])

    def _has(self, address: Address) -> bool:
        return any(address in network for network in self._networks)


def _address(host: str) -> Address | None:
    """Return the address that a host is written as, in any way that resolvers read (127.1, 0x7f000001, 2130706433);
    None: it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, UnicodeError):
        return None


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return _is_public(inner)
    return address.is_global and not address.is_multicast
