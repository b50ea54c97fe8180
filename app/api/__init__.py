"""The APIs: REST, JSON-RPC, the Open Inference Protocol, and the pages. HTTP in, HTTP out, and nothing else."""
