"""TLS: the keys and certificates that a server is given."""

from __future__ import annotations

import uvicorn

from quire.errors import ConfigError


def load_tls(config: uvicorn.Config) -> None:
    """Read keys and certificates, so that a ConfigError says in a line what is wrong with them."""
    if (config.ssl_keyfile or config.ssl_ca_certs or config.ssl_cert_reqs) and not config.ssl_certfile:
        raise ConfigError(
            "--ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile.", param="ssl_certfile"
        )
    if config.ssl_cert_reqs and not config.ssl_ca_certs:
        raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs: no certificate would be good.", param="ssl_ca_certs")
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"The files of --ssl-keyfile, --ssl-certfile and --ssl-ca-certs cannot be used: {error}."
        ) from error
