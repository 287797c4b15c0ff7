"""HTTP/1.1 as a client, with as little work as possible for each part of a stream: bytes out, bytes in.

The router, the load generator and the commands that ask a server share it. It handles no events, redirects, proxies or
compression.
"""
