"""Clients that other people's generators make from the service's documents."""
