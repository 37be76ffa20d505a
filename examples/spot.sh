#!/bin/bash
# AWS: ask for a stop when the instance is to be reclaimed.
token() { curl -sf -X PUT http://169.254.169.254/latest/api/token -H 'X-aws-ec2-metadata-token-ttl-seconds: 60'; }
(
  until curl -sf -H "X-aws-ec2-metadata-token: $(token)" \
      http://169.254.169.254/latest/meta-data/spot/instance-action > /dev/null; do sleep 5; done
  touch runs/a/.resume/stop
) &
watcher=$!
python train.py
code=$?
kill "$watcher"
exit "$code"
