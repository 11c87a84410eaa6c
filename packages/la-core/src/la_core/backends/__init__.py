"""How implementations plug in: the protocol, what a backend declares, discovery and choice."""
