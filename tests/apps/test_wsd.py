"""--schedule wsd: its decay is a replay with an edit of the rate."""

import train_pythia
from small_runs import assert_same_run, flags, numbers_of, proofs_of

import needle as ndl

EVERY = "--keep 0,2,4,... --keep-optimizer --prove 1 --warmup 1"


def test_decay_of_a_stable_run_gives_the_bits_of_wsd(tmp_path, tokens, here):
    wsd = flags(tmp_path, tokens, "wsd", EVERY, "--schedule wsd --decay-share 0.5", steps=8)
    assert train_pythia.main(wsd) == 0
    stable = flags(tmp_path, tokens, "stable", EVERY, "--schedule constant", steps=8)
    assert train_pythia.main(stable) == 0
    assert proofs_of(tmp_path, "wsd")[4] == proofs_of(tmp_path, "stable")[4]
    assert proofs_of(tmp_path, "wsd")[5]["digest"] != proofs_of(tmp_path, "stable")[5]["digest"]
    edit = {"do": "rate", "steps": [5, 8], "to": 0.1}
    run = ndl.open_run(tmp_path / "runs" / "stable")
    run.replay(4, [edit], name="decayed", flags=["--device", "cpu"])
    assert_same_run(tmp_path, "decayed", "wsd", step=8)
    assert proofs_of(tmp_path, "decayed") == proofs_of(tmp_path, "wsd")
    rates = [line["lr"] for line in numbers_of(tmp_path, "wsd")]
    assert rates[3] == max(rates) and rates[7] < rates[6] < rates[4] < rates[3]
