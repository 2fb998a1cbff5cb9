"""The worker: draft, verify, rollback. Never names a device."""
