"""Look-ups in C++, behind a plain C interface: `build.py` compiles it, `engine/drafters/lookups.py` calls it. No device's business."""
