#!/usr/bin/env bash
# make e2e: creates a cluster, images, stores and the chart, runs the tests, and removes everything. KEEP=1 keeps the cluster; ARGS go to pytest.
. "$(dirname "$(readlink -f "$0")")/cluster/settings.sh"
HERE=$(dirname "$(readlink -f "$0")")
ROOT=$HERE/../..
IMAGES=(engine operator spark examples redis s3 kafka flux kueue)
LOADED=(localhost/persist-{engine,operator,examples,redis,s3,kafka,flux,kueue}:dev)       # examples contains spark

finish() {
  local status=$?
  if [ -n "${KEEP:-}" ]; then say "the cluster stays: eval \"\$($HERE/cluster/cluster.sh env)\""; else "$HERE/cluster/cluster.sh" down || true; fi
  exit $status
}
step() { local start=$SECONDS; say "$1"; shift; "$@"; say "$((SECONDS - start)) s"; }

secret() { # NAMESPACE SECRET: created once, so that a second run on a kept cluster uses the same stores
  kubectl create namespace "$1" --dry-run=client -o yaml | kubectl apply -f - >/dev/null
  kubectl -n persist-stores get secret "$2" -o json |
    python3 -c 'import json, sys; s = json.load(sys.stdin); s["metadata"] = {"name": sys.argv[2], "namespace": sys.argv[1]}; json.dump(s, sys.stdout)' "$1" "$2" |
    kubectl apply -f - >/dev/null
}

stores() {
  local access=e2e password secret_key
  password=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
  secret_key=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
  kubectl create namespace persist-stores --dry-run=client -o yaml | kubectl apply -f - >/dev/null
  kubectl -n persist-stores get secret persist-store >/dev/null 2>&1 || kubectl -n persist-stores create secret generic persist-store \
    --from-literal=redis-password="$password" --from-literal=access-key=$access --from-literal=secret-key="$secret_key" \
    --from-literal=aws-credentials="$(printf '[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n' $access "$secret_key")" >/dev/null
  kubectl -n persist-stores get secret kafka >/dev/null 2>&1 || kubectl -n persist-stores create secret generic kafka \
    --from-literal=password="$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')" >/dev/null
  kubectl -n persist-stores apply -f "$HERE/stores/stores.yaml" >/dev/null
  kubectl -n persist-stores rollout status deployment/redis --timeout=120s
  kubectl -n persist-stores rollout status deployment/s3 --timeout=120s
  kubectl -n persist-stores rollout status deployment/kafka --timeout=180s
}

namespaces() {
  local namespace
  for namespace in persist-system persist-e2e persist-e2e-gone persist-e2e-other; do
    secret $namespace persist-store
    kubectl label --overwrite namespace $namespace pod-security.kubernetes.io/enforce=restricted >/dev/null
  done
  secret persist-e2e kafka
}

trap finish EXIT
step "cluster" "$HERE/cluster/cluster.sh" up
step "images" "$ROOT/spark-images/build.sh" "${IMAGES[@]}"
step "earlier version" "$HERE/previous.sh" "$PREVIOUS"
step "load" "$HERE/cluster/cluster.sh" load "${LOADED[@]}" localhost/persist-{engine,operator,examples}:previous
step "stores" stores
step "namespaces" namespaces
# The tag is always dev; the annotation forces a new pod for a new build on a kept cluster.
build=$("$ENGINE" image inspect --format '{{.Id}}' localhost/persist-operator:dev)
step "chart" helm upgrade --install persist-operator "$ROOT/charts/persist-operator" --namespace persist-system --values "$HERE/values.yaml" \
  --set-string "podAnnotations.build=$build" --wait --timeout 180s
cd "$ROOT"
step "tests" uv run --frozen pytest tests/e2e -m kind -q ${ARGS:-}
