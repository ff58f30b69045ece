"""`strata demo`: train a small model, kill a worker or a parameter server, and prove that no work was lost.

The demo runs a job twice in other processes, undisturbed and with kills, and compares the results: every row is
trained on exactly once per epoch, and the final weights are bit-identical. `show` runs it, `job` starts and kills,
`step_log` records what the workers trained on, `outcome` compares, `view` draws. `train.py` is the training script, for
`strata run`; `train_servers.py` is the one with a Trainer and parameter servers.
The demo may import everything except the command line, which it starts as a program.
"""
