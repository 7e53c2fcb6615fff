#!/usr/bin/env bash
# secrets.sh FOLDER RUN [NAME...]: prints the Secrets of the deployment for `kubectl apply -f -`.
#
# Makes in FOLDER, for its owner only, what is not there yet: an nkey seed for each role of RUN, the server's users, a
# certificate authority and the NATS nodes' certificate. NAMEs (DNS:... or IP:...) go into the certificate beside
# those of the cluster. Run it again after an upgrade: seeds and authority stay, users and certificate are made anew.
# Whoever has cert-manager makes `nats-tls` and `nats-ca` with it instead.
set -euo pipefail
umask 077
folder=${1:?the folder of the keys} run=${2:?the name of the run}
names="DNS:*.nats,DNS:*.nats.openforge.svc,DNS:*.nats.openforge.svc.cluster.local,DNS:localhost,IP:127.0.0.1"
for name in "${@:3}"; do names+=",$name"; done
mkdir -p "$folder"

"${PYTHON:-python3}" -m openforge.cli bus credentials --out "$folder/nkeys" --run "$run" >&2

ssl() {
  local said
  said=$(openssl "$@" 2>&1) || { echo "openssl 3 is needed and failed: openssl $1: $said" >&2; exit 1; }
}

new_key=(-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)
if [ ! -e "$folder/ca.key" ]; then
  ssl req -x509 "${new_key[@]}" -keyout "$folder/ca.key" -out "$folder/ca.crt" -days 3650 -subj "/CN=openforge" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign
fi
ssl req "${new_key[@]}" -keyout "$folder/tls.key" -out "$folder/tls.csr" -subj "/CN=nats"
ssl x509 -req -in "$folder/tls.csr" -CA "$folder/ca.crt" -CAkey "$folder/ca.key" -CAcreateserial -days 365 \
  -extfile <(printf '%s\n' "subjectAltName=$names" basicConstraints=CA:FALSE authorityKeyIdentifier=keyid \
    extendedKeyUsage=serverAuth,clientAuth) -out "$folder/tls.crt"

secret() {
  local name=$1
  shift
  echo "---"
  "${KUBECTL:-kubectl}" create secret generic "$name" --namespace openforge --dry-run=client -o yaml "$@"
}

for seed in "$folder"/nkeys/*.nk; do
  role=$(basename "$seed" .nk)
  secret "nkey-${role//_/-}" --from-file=seed="$seed"
done
secret nats-users --from-file="$folder/nkeys/users.conf"
secret nats-tls --from-file="$folder/tls.crt" --from-file="$folder/tls.key" --from-file="$folder/ca.crt"
secret nats-ca --from-file="$folder/ca.crt"
