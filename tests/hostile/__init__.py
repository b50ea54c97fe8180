"""The service against malicious callers: requests that no well-behaved client sends, and the documents' promises."""
