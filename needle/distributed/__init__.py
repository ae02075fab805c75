"""Many processes, one training: start ranks, connect them, share a step, detect missing ranks.

environment    the rank of this process, as its launcher says; spawn: ranks without a launcher
control        small values between ranks, and the end of all where one is missing or late
group          Group: what a program sees of the ranks
peers          the bytes of arrays between GPUs of one machine; nccl: of several; mpi: on CPUs
data_parallel  a step's gradients and the optimizer's state, shared; tree: the order of their sums
"""
