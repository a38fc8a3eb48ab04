"""`gradwire doctor` in torch: kernels on a device, and messages and algorithms between ranks,
beside their known answers."""
