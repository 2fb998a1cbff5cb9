"""The CPU in C++, behind a plain C interface: `build.py` compiles it, `backends/cpu` calls it."""
