"""What methods did to the loss of one small model (docs/frontier.md). `python benchmarks/frontier`
writes this file."""

SOURCE = "a byte-level transformer of 470,784 parameters, 1,440 steps of AdamW"

#: An algorithm as it is written: how much higher its loss was, in parts of that of uncompressed
#: averages, and the bound below which that is with 90 % confidence.
MEASURED: dict[str, tuple[float, float]] = {
    "LocalSGD(period=30)": (0.0692, 0.0758),
    "LocalSGD(period=30, fragments=3, outer=OuterSGD(lr=0.7, momentum=0.9, nesterov=True))": (
        0.0961,
        0.1095,
    ),
    "LocalSGD(period=30, fragments=3, outer=OuterSGD(lr=0.7, momentum=0.9, nesterov=True), overlap=5)": (
        0.0428,
        0.0539,
    ),
    "LocalSGD(period=30, outer=OuterSGD(lr=0.7, momentum=0.9, nesterov=True))": (0.1255, 0.1406),
    "LocalSGD(period=30, outer=OuterSGD(lr=0.7, momentum=0.9, nesterov=True), compressor=WireDtype(algorithm=AllReduce(), dtype='e3m0'))": (
        0.0891,
        0.103,
    ),
    "LocalSGD(period=30, outer=OuterSGD(lr=0.7, momentum=0.9, nesterov=True), eager=True)": (
        0.1567,
        0.1788,
    ),
    "LocalSGD(period=30, outer=OuterSGD(lr=0.8, momentum=0.9, nesterov=True), compressor=Quantize(dtype='int2', error_feedback=0.9))": (
        0.1287,
        0.1378,
    ),
    "LocalSGD(period=30, outer=OuterSGD(lr=1.0, momentum=0, nesterov=False), compressor=TopK(keep=64, error_feedback=0.95, per=(64, 64), bits=2, mean='senders'))": (
        0.0833,
        0.0937,
    ),
    "PowerSGD(rank=1)": (0.1601, 0.1717),
    "PowerSGD(rank=16)": (0.0075, 0.0191),
    "PowerSGD(rank=4)": (0.0432, 0.0573),
    "PowerSGD(rank=4, half_step=True)": (0.1326, 0.146),
    "Quantize(dtype='int4')": (0.0033, 0.0071),
    "Sign()": (0.2151, 0.2357),
    "TopK(keep=64, per=(64, 64))": (0.1729, 0.1862),
    "TopK(keep=64, per=(64, 64), bits=2)": (0.1743, 0.1828),
    "WireDtype(algorithm=AllReduce(), dtype='bfloat16')": (-0.0008, 0.0069),
    "WireDtype(algorithm=AllReduce(), dtype='int8')": (0.0036, 0.0064),
    "WireDtype(algorithm=PowerSGD(rank=16), dtype='int4')": (0.0132, 0.0187),
    "WireDtype(algorithm=PowerSGD(rank=16), dtype='int8')": (0.0022, 0.0074),
    "WireDtype(algorithm=PowerSGD(rank=4), dtype='int8')": (0.0428, 0.0516),
}
