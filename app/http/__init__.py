"""The server below the routes: listener, load shedding, timeouts, request bodies, middleware, authentication.

Knows replies and telemetry; nothing of calls, of any API or of the pool.
"""
