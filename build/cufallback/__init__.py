"""cufallback: build, prove and keep a CUDA fallback of a vLLM release."""

__version__ = "0.1.0"
