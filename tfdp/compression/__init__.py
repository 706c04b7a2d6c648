"""Ways to send fewer bytes of a gradient: `Communication(compression=...)`.

method      the interface: what is kept, encode, exchange, decode
blocks      what methods share that cut numbers into blocks
cast, int8, fp8, sign_sgd, top_k, random_k, power_sgd   a method each
"""

from tfdp.compression.cast import Cast
from tfdp.compression.fp8 import FP8
from tfdp.compression.int8 import Int4, Int8
from tfdp.compression.power_sgd import PowerSGD
from tfdp.compression.random_k import RandomK
from tfdp.compression.sign_sgd import SignSGD
from tfdp.compression.top_k import TopK

__all__ = ["FP8", "Cast", "Int4", "Int8", "PowerSGD", "RandomK", "SignSGD", "TopK"]
