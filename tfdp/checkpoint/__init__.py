"""Files of sharded models: each host writes its part, one command merges them."""

from tfdp.checkpoint.merge import merge_parts
from tfdp.checkpoint.parts import save_parts

__all__ = ["merge_parts", "save_parts"]
