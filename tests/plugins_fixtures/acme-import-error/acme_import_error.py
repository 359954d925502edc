"""A plugin whose driver is missing."""

raise RuntimeError("libnpu.so.7 is missing")
