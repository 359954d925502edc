"""Operations on the request table: patch, state update, record."""

from modelrunner.kernels.table.reference import apply_patch, update_state, write_record

__all__ = ["apply_patch", "update_state", "write_record"]
