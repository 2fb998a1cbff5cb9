"""The devices: the only place one is named."""
