"""Runs that are proven, trained again from a step on, changed there, and compared.

proofs    digests of weights and moments; writes the lines of proof and manifest.json
replays   `needle replay`: writes a run of edits, with replay.json
bank      `needle replay --edits`: writes a replay for each file of edits, and bank.json
verify    `needle verify`: a run's files and steps, recomputed; prints verdicts
measures  losses, divergences and distances of weights between models
compare   `needle compare`: prints them for runs, as rows
effects   `needle compare --edits`: prints the effects of a bank's edits, and predicts them
suite     `needle suite`: trains a list of models; writes their cards, and how to check them
"""
