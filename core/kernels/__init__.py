"""Array operations that need no framework: in NumPy, on shapes without data, and in terms of other
operations.

**The design.** A method is handed `ops`, the kernels of whoever runs it, and uses nothing else on
arrays but the operators that NumPy, torch and JAX share. What a backend *must* have is few.
Whatever can be made of these has a body in the core, and the body is the reference: a backend that
can do better overrides the name, and the parity tests compare the two. How arrays lie on a device,
and what its compiler wants to know, is one object of a backend (`storage.py`). `numpy.py` is the
plainest backend, whose float64 is the oracle of all others; `abstract.py` runs the same programs on
shapes alone, to count what they send.

**The words.**

- *kind*: arrays of one kind may be joined in one array. They have one dtype; in JAX they also vary
  along the same mapped axes (`arrays.array_key`, beside the keys of what may share a message or a
  call of a kernel).
- *pack*: arrays of one kind, laid one behind the other, that travel or are computed with as one.
- *part*: one of the pieces into which a pack is cut, as many as there are replicas in a group, each
  of which averages one.
- *lot*: rows that belong together in a matrix made of several arrays: those of one replica's part,
  or those that share a scale.
- *share*: what one replica contributes to a mean, or the factor that makes it so: 1/W, or weight
  over the sum of weights.
- *code*: a small integer or short float in the place of a number; a *scale* is what it is
  multiplied by.
- *donated*: given away by `out=`, to be written over. Only the returned array may be used
  afterwards.

**The warnings.** Nothing may rest on the order in which a compiler fuses or sums, on a conversion
out of range, or on how a factor is rotated: compare P Qᵀ, never P. Random numbers are a hash in
int32 arithmetic, because every generator of a framework gives other bits. Orthonormalization is
Gram-Schmidt, done twice: once is wrong by a sixth where a gradient has a smaller rank than the
factor, and LAPACK may deadlock under `pmap`.
"""
