"""The steps of flows, and what they need to reach a node."""
