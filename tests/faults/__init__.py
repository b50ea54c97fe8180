"""Faults on purpose: killed and hanging processes, too much load, bad clients, full disks; and the long soak."""
