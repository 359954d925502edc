"""Operations that gather a step's batch from the request table."""

from modelrunner.kernels.batch.reference import gather_block_table, gather_rows, gather_tokens, slot_mapping

__all__ = ["gather_block_table", "gather_rows", "gather_tokens", "slot_mapping"]
