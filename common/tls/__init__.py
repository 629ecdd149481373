"""Mutual TLS between the components, and TLS towards clients; certificates are mounted files that may change."""
