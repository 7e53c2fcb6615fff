#!/bin/sh
# Makes what the services find when they start. What exists stays, so it may run as often as it likes.
set -eu
umask 077

openforge bus credentials --out /secrets/roles --run "$OPENFORGE_RUN" >/dev/null
for seed in /secrets/roles/*.nk; do
  role=$(basename "$seed" .nk)
  mkdir -p "/secrets/$role"
  cp "$seed" "/secrets/$role/seed"
done
mkdir -p /secrets/nats /secrets/grafana
cp /secrets/roles/users.conf /secrets/nats/users.conf
[ -e /secrets/grafana/password ] || head -c 18 /dev/urandom | base64 >/secrets/grafana/password
chown -R "$OWNER" /secrets

mkdir -p /data/gate /data/manager /data/verifier /data/sockets
chmod 711 /data /data/manager /data/verifier /data/sockets # sandboxes are shown folders below
chown "$OWNER" /data /data/gate /data/manager /data/verifier /data/sockets /volumes/*
