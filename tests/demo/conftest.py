from tests.demo.published import alone, mirror

__all__ = ["alone", "mirror"]
