"""`accelerate(model)`: an engine that gives the same answers faster."""
from importlib.util import find_spec

from minits.thinking import Engine, ThinkingStates


def accelerate(model: ThinkingStates) -> Engine:
    """The fastest engine for `model` where it is, for inference only. Same answers up to rounding.

    CUDA: fused kernels in CUDA graphs (engine.py). They share the model's weights, repacked, so
    use nothing but the engine from then on. CPU: the model itself.

    Raises ValueError on CUDA without triton.
    """
    if model.device.type != "cuda":
        return model.eval()
    if not find_spec("triton"):
        raise ValueError(
            "the fast path on CUDA needs triton, which this build of torch came without: pip "
            "install triton, or use the plain path (--plain)."
        )
    from minits.fast.engine import FastEngine  # needs triton

    return FastEngine(model.eval())
