"""Runs that are proven, trained again from a step on, changed there, and compared.

proofs    digests of weights and moments; writes the lines of proof and manifest.json
replays   a run of edits: its folder with replay.json, its training, its control
bank      `needle replay`: one of them, or with --edits one for each file of edits, and bank.json
verify    `needle verify`: a run's files and steps, recomputed; prints verdicts
compare   `needle compare`: losses, divergences, distances of weights; effects of a bank's edits
suite     `needle suite`: trains a list of models; writes their cards, and how to check them
"""
