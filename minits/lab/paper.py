"""The figures of the paper's tables, and what its text says of its figures.

Qwen2.5 base models, 0.5B in Table 1 and 1.5B in all others. Accuracies are percent.
"""

# Table 1: on [N, 100] operations, by (task, method) and N.
STATE_TRACKING: dict[tuple[str, str], dict[int, float]] = {
    ("parity", "no-cot"): {10: 54.67, 20: 57.50, 40: 59.60},
    ("parity", "cot"): {10: 12.35, 20: 38.12, 40: 64.38},
    ("parity", "thinking"): {10: 98.37, 20: 99.02, 40: 100.00},
    ("vars", "no-cot"): {10: 2.15, 20: 2.17, 40: 2.19},
    ("vars", "cot"): {10: 6.78, 20: 35.45, 40: 87.75},
    ("vars", "thinking"): {10: 33.76, 20: 87.23, 40: 97.71},
}

# Table 2: (accuracy, speed-up over CoT) by benchmark and method.
REASONING: dict[str, dict[str, tuple[float, float]]] = {
    "gsm": {
        "cot": (60.50, 1.0),
        "no-cot": (34.11, 5.59),
        "thinking": (42.22, 2.66),
        "coconut": (32.65, 3.14),
        "icot": (34.00, 5.71),
    },
    "full": {
        "cot": (54.79, 1.0),
        "no-cot": (33.47, 1.89),
        "thinking": (54.91, 1.19),
        "coconut": (33.71, 1.14),
        "icot": (28.84, 1.59),
    },
    "parametric": {
        "cot": (43.07, 1.0),
        "no-cot": (31.92, 2.03),
        "thinking": (43.05, 1.23),
        "coconut": (32.60, 1.21),
        "icot": (36.31, 1.80),
    },
}

# Table 3: GSM by Coconut, (accuracy, speed-up over CoT) by the number of latents.
COCONUT: dict[int, tuple[float, float]] = {
    6: (32.65, 3.14),
    9: (33.48, 2.53),
    12: (31.29, 2.08),
    15: (32.35, 1.77),
    21: (32.65, 1.38),
}

# Section 4.5: GSM, each question's last sentence copied before it where the answer was wrong.
QUESTION_FIRST = (42.22, 48.65)

# Section 4.5: of the queries that Thinking States solve on GSM, the share that CoT does not.
RIGHT_ALONE = 0.12

# What the ablations and the figure of training cost show; the paper prints no table of them.
LAYERS = "rises with the layer, nearly 20 points from the shallowest to the deepest (1.5B)"
CHUNKS = "best at c = 8, less beyond; the speed-up grows with c (1.5B)"
LM_LOSS = "of Parity's and Vars' examples the answer is predicted; of other texts it does not say"
COST = "Coconut's time is linear in the steps, about 10 times Thinking States' at ten of them"

# Appendix: the rows of GSM8K-Aug that the paper begins with; 375,101 stayed, for which a teacher
# LLM kept text and steps. Whether its baselines saw the others, too, it does not say. The hash is
# that of the public file's Git LFS pointer (da03/Internalize_CoT_Step_by_Step,
# data/gsm8k/train.txt): the file itself was never at hand here.
GSM8K_AUG = {
    "what": "GSM8K-Aug, the text of iCoT's repository",
    "rows": 385_620,
    "sha256": "0a3909a9e7d8d2f7ad6b8c7b5608aa744988d835f9bf874d4cf06ca77df6bf8c",
}
# A Coder model of that size has the same values; only its name differs.
QWEN_1_5B = {
    "what": "Qwen2.5-1.5B base",
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "eos_token_id": 151643,
}
