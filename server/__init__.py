"""HTTP in, text out. Never imports torch."""
