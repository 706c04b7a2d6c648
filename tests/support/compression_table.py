"""The methods of tfdp.compression, by how much of a gradient arrives."""

from tfdp.compression import FP8, Cast, Int4, Int8, PowerSGD, RandomK, SignSGD, TopK

SMALL = {"min_bytes": 0}
#: Nothing is lost but by rounding.
IDENTITIES = {
    "random-k-all": RandomK(1.0, **SMALL),
    "power-sgd-full": PowerSGD(1000, start_step=0, min_compression_rate=1e-6, **SMALL),
    "power-sgd-later": PowerSGD(1, start_step=1000, min_compression_rate=1, **SMALL),
}
#: What is lost is sent later.
LOSSY = {
    "cast": Cast("bfloat16", error_feedback=True, **SMALL),
    "cast-float16": Cast("float16", error_feedback=True, **SMALL),
    "int8": Int8(32, **SMALL),
    "int4": Int4(**SMALL),
    "fp8-e4m3": FP8("e4m3", **SMALL),
    "fp8-e5m2": FP8("e5m2", **SMALL),
    "sign": SignSGD(**SMALL),
    "top-k": TopK(0.1, **SMALL),
    "top-k-warmup": TopK(0.05, warmup_steps=3, **SMALL),
    "random-k": RandomK(0.1, **SMALL),
    "power-sgd": PowerSGD(2, start_step=0, min_compression_rate=1, **SMALL),
    "power-sgd-start": PowerSGD(2, start_step=2, min_compression_rate=1, **SMALL),
}
METHODS = IDENTITIES | LOSSY
