"""Typed configuration and the words every layer shares: settings, catalogue, storage, errors."""
