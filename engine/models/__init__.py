"""Target models: how a checkpoint's configuration becomes a forward pass over flat rows."""
