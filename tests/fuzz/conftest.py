from tests.torch.conftest import alone

__all__ = ["alone"]
