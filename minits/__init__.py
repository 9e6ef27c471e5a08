"""minits: a reference implementation of "Latent Reasoning with Supervised Thinking States".

This folder is the paper, in reading order:

    tensors.py           a few helpers (settings.py: what a setting means)
    qwen.py, cache.py    the backbone M, Qwen2.5; its key/value cache
    thinking.py          section 3.1: the blocks T and C, the backbone in three parts
    supervision.py       section 3.4: steps in a text -> thoughts of chunks
    teacher_forcing.py   section 3.2: training, all chunks at once
    prefill.py           section 3.3: reading a prompt, chunk by chunk and speculatively
    generation.py        answers

The folders beside it are the rest: checkpoint (files), tasks, methods, training, lab (results),
cli; and fast, which does what these files define, faster. Every fast thing is tested against its
definition here.

One chunk's way through the layers, with the paper's L_in (1) and L_out (all layers but the last):

    tokens of chunk k ──> embedding ──> layer 1 ─X─(+)─> layers between ─H──┬──> last one ─> logits
                                                    ^                       v
                                                    S   c vectors           T   "heads" EOS = Z
                                                    └── C <── the thought before: chunk k-1

Dimensions, one letter each, in every shape:

    B rows · L tokens of a row · P slots of the cache
    Q query heads · G key/value heads · D head size
    E hidden size (the paper's d) · V vocabulary · K chunks of a row · c tokens a chunk
    n tokens of a thought · N any number of things · R non-trivial thoughts of a batch

The paper's letters: M the backbone, T and C the blocks, X, S and H (its H^out) what the drawing
shows, X + S its X̃, Z a thought, Z* and S* gold ones, |R| the non-trivial thoughts that chunks of a
prompt read, L_in and L_out layers, L_LM and L_T losses. It counts chunks from 1, the code from 0.

H, S and log-probabilities of what was generated: a training pass under its own thoughts gives the
same vectors. Prompts may have any lengths.

    model, tokenizer = load("minits/assets/parity")
    found = generate(model, tokenizer, prompts)  # hook=…, an Intervention: think something else
    asked = [encode_prompt(tokenizer, prompt) for prompt in prompts]  # from supervision.py, as Row
    rows = [Row(ids + r.ids, len(ids), r.thought_ids) for ids, r in zip(asked, found)]
    batch = collate(rows, model)  # from teacher_forcing.py, as what follows; [B, L, E] each
    S, (H, out) = gold_states(model, batch), teacher_forced(model, batch)
    logs = model.backbone.lm_head(out).log_softmax(-1)  # of what batch.labels [B, L] has there

To try another thing of one's own:

- T or C from other weights, or with more: `ThinkingStates.copy_blocks`, where they start. A second
  layer of T is number 1 in T's cache (`self.second(x, frame, 1)`), of which `think` makes room for
  one. On CUDA fast/engine.py's `say`, and `think` before it, know one layer alone.
- Another C: `CompressionBlock` where it needs no lengths; `last_outputs`; `compress` (thinking.py),
  which stands once more in fast/flat_batch.py's `teacher_forced`, which is what trains. On CUDA
  fast/engine.py's `compress` runs C's layer by itself, and calls `last_outputs`.
- States added elsewhere: X + S in prefill.py (two places), in `read_tokens` and `teacher_forced`;
  then fast/flat_batch.py's `teacher_forced` and fast/engine.py's `middle` and `read_tokens`.
- Another loss or other rows: a method (methods/method.py).

tests/paper and tests/fast/test_twins.py tell what was forgotten; of the engine only on CUDA.
"""
from minits.checkpoint.weights import load, save
from minits.generation import (
    GenerationConfig,
    GenerationResult,
    generate,
    generate_ids,
    stream_ids,
)
from minits.prefill import Intervention
from minits.thinking import Thought, ThinkingConfig, ThinkingStates

__all__ = [
    "GenerationConfig",
    "GenerationResult",
    "Intervention",
    "Thought",
    "ThinkingConfig",
    "ThinkingStates",
    "accelerate",
    "generate",
    "generate_ids",
    "load",
    "save",
    "stream_ids",
]


def __getattr__(name: str):
    """`accelerate`, when it is first asked for: no one needs fast/ to read or run the paper."""
    if name == "accelerate":
        from minits.fast.accelerate import accelerate

        return accelerate
    raise AttributeError(f"module 'minits' has no attribute {name!r}")
