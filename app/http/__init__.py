"""The server below the routes: listener, load shedding, timeouts, request bodies, middleware, authentication.

Imports replies, calls, intake, pool and telemetry; nothing of an API.
"""
