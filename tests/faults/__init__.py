"""Injected faults: killed and hanging processes, overload, bad clients, full disks; and the long soak test."""
