"""The HTTP API: the table of routes, the guard around each route, request bodies, response bytes, the OpenAPI document."""
