"""minits: a reference implementation of "Latent Reasoning with Supervised Thinking States" on Qwen2.5.

Dimension key, used in every shape:
    B rows · T new tokens · S slots · H query heads · G kv heads · D head size · E hidden size · V vocabulary ·
    K chunks · c chunk size · n thought length · R non-trivial thoughts · N any number of chunks

Paper symbol -> code (the README's table adds values and deviations):
    M_theta  ThinkingStates.backbone                 T  ThinkingStates.thinking_block
    C        ThinkingStates.compression_block        c  ThinkingConfig.chunk_size
    L^in     ThinkingConfig.inject_after             L^out  ThinkingConfig.extract_after
    X_k      ThinkingStates.lower(...)               H_k^out  ThinkingStates.middle(X + S)
    S_k      ThinkingStates.states(...)              Z_k  Thought.ids
    L_LM, L_T  Losses.lm, Losses.thought             Algorithm 1  prefill.prefill_speculative
    Z*_k     Row.thoughts                            <T>  supervision.MARKER

Reading order: qwen.py, cache.py, thinking.py, prefill.py, generation.py, supervision.py, train.py.
"""
from minits.generation import GenerationConfig, GenerationResult, generate, generate_ids, stream_ids
from minits.thinking import Thought, ThinkingConfig, ThinkingStates
from minits.checkpoint.weights import load, save

__all__ = ["GenerationConfig", "GenerationResult", "Thought", "ThinkingConfig", "ThinkingStates", "generate",
           "generate_ids", "load", "save", "stream_ids"]
