"""gradwire without a framework: what a method is, what it may ask for, and everything that can be
known of it before a tensor exists. NumPy is the only dependency.

**The design.** A method of averaging gradients is written once, as a coroutine over arrays. It
computes locally with the kernels that it is given (`gradwire.core.ops.Ops`), and *asks* for
whatever takes all replicas: `p = await mean(q)`. It never sends anything. Who runs it, the driver,
performs what it asks for: the simulator here for N replicas in one process, a hook of DDP in
`gradwire.torch_backend`, a traced function in `gradwire.jax_backend`. So the same source can be
simulated, counted, proved in float64, and trained with.

A reader begins with three files. `algorithm.py` is the contract of a method, `protocol/programs.py`
is how a coroutine is run, and `algorithms/compressor.py` is all that methods which compress have in
common: error feedback, warm-up steps, steps that are not finite. Each file beside it in
`algorithms/` is one method.

**The words.** Each is used for one thing; those of messages are defined in `protocol`, those of
arrays in `kernels`.

- *replica*: one of W copies of the model that train together; a rank, a device, or several of them.
- *method*, *algorithm*: what turns this replica's gradients into what all optimizers are given. The
  object is a frozen configuration; whatever changes is in its state.
- *memory*: an array that an algorithm keeps of one parameter from step to step, by name:
  `state.tensors[parameter][memory]`. The compression error is one ("error"), a factor another
  ("q").
- *residual*, *compression error*: what a replica has not sent of gradient plus earlier error. It is
  local.
- *commit*: put the new memory in the place of the old. Only after `step_is_finite`, by
  `ops.where(ok, new, old)`.
- *overlap*: compute while a message is on its way. A hook overlaps with the backward pass, a
  schedule with local steps.
- *portable*: the same in every framework. A portable method runs in all of them, a portable state
  is loaded by all of them.
- *phase*: which of several kinds of step an algorithm is in, by a counter in its state.
- *spec*: shape and dtype of a parameter. *View*: the parameter as a batch of matrices.

**The warnings.** A parameter's position means nothing, its name everything: buckets are rebuilt,
layers frozen, states moved. What is donated by `out=` is gone. A decision that depends on an array
is a `branch`, since in JAX there is no `if`. And nothing here may import a framework, nor the
backends each other: a test walks all imports.
"""
