"""Forerun: a drop-in server for clients of text-generation-inference, with speculative decoding that never changes the output."""

__version__ = "3.4.0"
