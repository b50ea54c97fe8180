"""JSON-RPC 2.0 at /rpc: envelopes and batches, and the methods."""
