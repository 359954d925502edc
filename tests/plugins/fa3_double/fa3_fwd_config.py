"""Build flags of fa3-fwd, as far as they are read."""

CONFIG = {"build_flags": {"FLASHATTENTION_DISABLE_SOFTCAP": False}}
