"""The engine `ray` on two machines that are network namespaces; `scripts/test-cluster` runs these tests."""
