"""The batcher: plain, synchronous decisions; async only at its edge. Never imports torch."""
