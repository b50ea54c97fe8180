"""The server below the routes: listener, load shedding, timeouts, request bodies, middleware, authentication.

It uses replies and telemetry, and is independent of calls, APIs and the pool.
"""
