#!/bin/bash
# Restart after crashes and stops, until the run is finished. train.py has stop=StopOn(exit_code=85).
for attempt in $(seq 100); do
  python train.py
  code=$?
  case $code in
    0) exit 0 ;;                       # finished
    3) exit 3 ;;                       # halted: a human must look
    85) exit 85 ;;                     # stopped: somebody asked for it
    *) echo "attempt $attempt ended with $code; again in 10 s"; sleep 10 ;;
  esac
done
exit 1
