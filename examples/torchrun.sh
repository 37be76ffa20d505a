#!/bin/bash
# Four workers on this machine; when one dies, all are started again, and resume from the last commit.
exec torchrun --standalone --nproc-per-node=4 --max-restarts=10 train.py
