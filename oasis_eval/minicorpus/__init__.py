"""A corpus of the suite's own, generated: prose, word problems and a tokenizer; no download.

Small models train on it within minutes on a CPU, and the tasks `mini_ppl` and `mini_gsm` score it.
"""
