"""What the worker scripts in torch train. Imported by them as `given`."""

import torch


class GivenGradients(torch.nn.Module):
    """A loss whose gradient is what one likes: the sum of parameter times gradient."""

    def __init__(self, initial):
        super().__init__()
        for name, value in initial.items():
            self.register_parameter(name, torch.nn.Parameter(value))

    def forward(self, given):
        return torch.stack([(getattr(self, name) * g).sum() for name, g in given.items()]).sum()
