"""The HTTP edge: the table of routes, the guard around each route, reading bodies, encoding responses, the OpenAPI document."""
