"""The shortest way to an endpoint: one lookup in place of a search through all routes.

FastAPI's router looks at one route after the other, and wraps an endpoint in what its dependencies would need. Nearly
all requests are POSTs to endpoints that take the request and nothing else; for these that cost as much as all the rest
of turning a request away. The routes themselves are FastAPI's, and what is not found here is found by its router.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import QuireError
from quire.serving.api.error_handlers import http_error_response
from quire.serving.api.error_responses import error_response


class DirectRoutesMiddleware:
    """ASGI middleware, the innermost, that answers POSTs to endpoints which take a Request alone.

    Args:
        app: The router; gets everything else.
        routes: Its routes.

    Attributes:
        paths: Of the endpoints that are found here.
    """

    def __init__(self, app: ASGIApp, *, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._routes = {route.path: route for route in routes if isinstance(route, APIRoute) and _is_direct(route)}
        self.paths = frozenset(self._routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        try:
            response = await route.endpoint(Request(scope, receive, send))
        except QuireError as error:
            response = error_response(error)
        except HTTPException as error:
            response = http_error_response(error, scope["path"])
        await response(scope, receive, send)


def _is_direct(route: APIRoute) -> bool:
    takes = route.dependant
    given = (takes.path_params, takes.query_params, takes.header_params, takes.cookie_params, takes.body_params)
    return (
        route.methods == {"POST"} and takes.request_param_name is not None and not any(given) and not takes.dependencies
    )
